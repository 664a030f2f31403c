"""Nobody starves: what all others are served while a program waits is bounded, whatever they ask for and however."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bough.base.messages import Namespace, Request
from bough.base.program import Program
from tests.scheduler.world import World, request

from .planted import BY_NAME, planted

POOL, CALLS, LONGEST, MAX_WAIT, SHARE = 128, 2, 60, 0.5, 2
TURN = POOL + 2 * (LONGEST + 100)
"""Service of one turn at most: a pool, and what the call that ends it and the one beside it come to."""
ROOM_STEPS, STEP_SERVICE = 50, 100
"""Steps that whoever has a turn waits for room at most, and the service of one on average."""


@dataclass(frozen=True)
class Flood:
    """Requests of which ``at_once`` are always there; ``said`` is in the envelope of each."""

    at_once: int
    prompt: int
    tokens: int
    fresh: bool
    tenant: str
    said: dict[str, Any]

    def request(self, i: int) -> Request:
        program = Program(id=f"f{i}" if self.fresh else f"f{i % 3}", pause=0.0, **self.said)
        return asked(f"f{i}", [i % 50 + 1] * self.prompt, self.tokens, self.tenant, program)


FLOODS = st.builds(
    Flood,
    at_once=st.integers(2, 6),
    prompt=st.integers(1, LONGEST),
    tokens=st.integers(1, 10),
    fresh=st.booleans(),
    tenant=st.sampled_from(("", "other")),
    said=st.sampled_from(({}, {"next_uses": 0}, {"deadline": 1e-3}, {"fork": "all"}, {"priority": 5})),
)


def asked(rid: str, prompt: list[int], tokens: int, tenant: str, program: Program) -> Request:
    made = request(rid, prompt, namespace=Namespace(tenant=tenant), max_tokens=tokens, ignore_eos=True)
    return msgspec.structs.replace(made, program=program)


def serve(flood: Flood, victims: int, prompt: int) -> int:
    """Programs of ``CALLS`` calls run beside a flood; the steps that it took.

    Raises AssertionError where all together have had more service since one was overdue than the turns before its own,
    of those that are there and of the flood, can come to.
    """
    w = World(cells=POOL, policy="program", eviction="program", step_tokens=32, max_running=2, max_wait=MAX_WAIT)
    programs, floods, steps = w.scheduler._programs, 0, 0
    programs.turn_share, programs.turn_seconds = SHARE, ROOM_STEPS * 0.01
    most = (flood.at_once + victims + 1) * ((SHARE + 1) * TURN + ROOM_STEPS * STEP_SERVICE)
    calls = dict.fromkeys(range(victims), 0)
    waiting: dict[int, tuple[float, int]] = {}
    while calls or waiting:
        while sum(w.readers[rid].finish is None for rid in list(w.readers) if rid[0] == "f") < flood.at_once:
            w.submit(flood.request(floods))
            floods += 1
        for v, n in calls.items():
            if v not in waiting and steps > 10:
                w.submit(asked(f"{v}-{n}", [60 + v] * (prompt + n), 4, "", Program(id=f"v{v}", pause=0.0)))
                waiting[v] = w.now, programs.service
        w.step()
        steps += 1
        for v, (since, service) in list(waiting.items()):
            if w.readers[f"{v}-{calls[v]}"].finish is not None:
                del waiting[v]
                calls[v] += 1
            elif w.now - since <= MAX_WAIT:
                waiting[v] = since, programs.service
            else:
                assert programs.service - service <= most, "starved"
        calls = {v: n for v, n in calls.items() if n < CALLS}
        for rid in [rid for rid, reader in w.readers.items() if rid[0] == "f" and reader.finish is not None]:
            del w.readers[rid]
    return steps


@settings(max_examples=20, deadline=None)
@example(Flood(at_once=2, prompt=22, tokens=1, fresh=False, tenant="", said={"deadline": 1e-3}), 1, 20)
@given(FLOODS, st.integers(1, 3), st.integers(1, LONGEST))
def test_nobody_starves_behind_a_stream(flood: Flood, victims: int, prompt: int) -> None:
    assert serve(flood, victims, prompt)


def test_without_turns_somebody_starves() -> None:
    flood = Flood(at_once=3, prompt=20, tokens=8, fresh=True, tenant="", said={"priority": 5})
    with planted(BY_NAME["nobody_gets_a_turn"]), pytest.raises(AssertionError, match="starved"):
        serve(flood, 1, 50)
    assert serve(flood, 1, 50)
