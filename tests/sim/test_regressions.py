"""What the simulation found, as the smallest scripts that showed it."""

from __future__ import annotations

import numpy as np

from bough.base.constraint import Reasoning
from bough.base.messages import Request
from bough.base.params import SamplingParams

from .oracle import NAMESPACES
from .planted import BY_NAME, planted
from .replay import failure
from .script import Abort, Arrive, Event, Script, Settings
from .simulation import Simulation

SETTINGS = Settings(
    page_size=1, policy="fcfs", eviction="lru", cache="radix", depth=1, step_tokens=16, max_running=4, n_cells=64,
    max_wait=5.0, queue_requests=100, headroom=0.4,
)  # fmt: skip


def arrive(
    step: int,
    serial: int,
    rid: str,
    max_tokens: int = 8,
    timeout: float | None = None,
    gates: tuple[tuple[int, bool], ...] = (),
) -> Arrive:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    ids = np.array([serial % 90 + 1, 5, 7], dtype="<i4").tobytes()
    request = Request(rid=rid, ids=ids, params=params, timeout=timeout)
    return Arrive(step, request, seed=serial * len(NAMESPACES), gates=gates)


def passes_but_for(bug: str, events: list[Event]) -> None:
    script = Script(SETTINGS, events)
    assert failure(script) is None
    with planted(BY_NAME[bug]):
        assert failure(script) is not None


def test_an_id_used_again_while_its_aborted_request_is_in_flight() -> None:
    """The late commit of the aborted request deleted its successor: it could not be aborted any more, and the
    scheduler called itself idle while it ran."""
    passes_but_for(
        "reused_id_is_forgotten",
        [
            arrive(0, 1, "r0"),
            Abort(3, ("r0",)),
            arrive(3, 2, "r0"),
            Abort(6, ("r0",)),
        ],
    )


def test_a_gate_that_refuses_stops_the_gates_before_it() -> None:
    """The first gate's work was never cancelled when the second one refused or failed at once."""
    passes_but_for("gate_refusal_leak", [arrive(0, 1, "r0", gates=((9, False), (-1, False)))])
    passes_but_for("gate_refusal_leak", [arrive(0, 1, "r0", gates=((0, True), (9, False)))])


def test_deadlines_of_requests_that_ended_are_forgotten() -> None:
    """The heap of deadlines kept an entry for every request until its timeout would have passed."""
    events: list[Event] = [arrive(2 * i, i + 1, f"r{i}", max_tokens=1, timeout=1e6) for i in range(300)]
    simulation = Simulation(Script(SETTINGS, events))
    simulation.run()
    assert len(simulation.scheduler._deadlines._heap) < 100


def test_a_prompt_that_fails_says_nothing_of_what_it_forces() -> None:
    """A thinking budget of nothing forces the end of the reasoning behind the prompt. When the step of both failed,
    the forced tokens were sent although the logprobs of the prompt were lost with it."""
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=0, logprob_start=8)
    ids = np.arange(20, 32, dtype="<i4").tobytes()
    request = Request(rid="r0", ids=ids, params=params, reasoning=Reasoning(end=(8, 8), budget=0, begin=()))
    assert failure(Script(SETTINGS, [Arrive(0, request, seed=88, fail_at=13)])) is None
