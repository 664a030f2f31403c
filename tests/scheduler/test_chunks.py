"""How the tokens of a step are shared out among prompts."""

from __future__ import annotations

import msgspec
import pytest

from bough.base.messages import Abort, Finish, Request
from bough.base.params import PoolingParams
from bough.scheduler.planner import Flight

from .world import MODEL, World, request

STEP, CUT = 160, 128
"""The budget of a step, and what a prompt gets of it that goes on in the next one while others wait."""


def shares_of(world: World, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """How many tokens each row computes, step by step from now on."""
    shares: list[list[int]] = []
    planner = world.scheduler._planner
    plan = planner.next

    def watched(settled: bool) -> Flight | None:
        flight = plan(settled)
        if flight is not None:
            shares.append(flight.plan.n_new.tolist())
        return flight

    monkeypatch.setattr(planner, "next", watched)
    return shares


def prompt(name: str, n: int, first: int, max_tokens: int = 1, priority: int = 0) -> Request:
    return request(name, [first + i % 7 for i in range(n)], max_tokens=max_tokens, priority=priority)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([STEP + 110], [[STEP], [110]], id="one alone takes whole steps"),
        pytest.param([CUT + 142, 20], [[CUT, 20], [142]], id="the end of a prompt needs no step of its own"),
        pytest.param([70, 70, 70], [[70, 70], [70]], id="who would only begin waits for those who end"),
        pytest.param([1, 54, 40], [[1, 54, 40]], id="a prompt of one token generates nothing yet"),
        pytest.param([400, 30, 90], [[CUT, 30], [CUT], [144], [90]], id="one is cut, shorter ones end in the reserve"),
    ],
)
def test_prompts_share_a_step(lengths: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP)
    shares = shares_of(w, monkeypatch)
    w.submit(*(prompt(f"p{i}", n, 10 * (i + 1)) for i, n in enumerate(lengths)))
    w.run()
    assert shares == expected


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        pytest.param([54, 30], [[1, 54], [1, 1, 30]], id="who generates waits for a third of a step, not for more"),
        pytest.param([53, 30], [[1, 53, 30]], id="less is no reason to wait"),
        pytest.param([54, 54], [[1, 54, 1]], id="one token is no reason to wait"),
        pytest.param(
            [CUT + 59, 40], [[1, CUT - 1], [1, 60, 40]], id="what running rows add to theirs is no reason to wait"
        ),
        pytest.param([400, 30], [[1, CUT - 1, 30], [1, 1, STEP - 2]], id="beside one that is cut, shorter ones end"),
    ],
)
def test_prompts_beside_rows_that_generate(
    lengths: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(step_tokens=STEP)
    shares = shares_of(w, monkeypatch)
    w.submit(request("d", [1], max_tokens=20, ignore_eos=True))
    w.step()
    w.submit(*(prompt(f"p{i}", n, n % 50 + 10, max_tokens=5) for i, n in enumerate(lengths)))
    w.run()
    assert shares[1 : 1 + len(expected)] == expected


@pytest.mark.parametrize(
    ("generating", "lengths", "expected"),
    [
        pytest.param(0, [200], [[STEP], [40]], id="a whole step where nobody generates"),
        pytest.param(1, [100], [[1, 39], [1, 39], [1, 22]], id="a prompt alone goes in small steps"),
        pytest.param(1, [90, 60], [[1, 63], [1, 27, 36], [1, 24]], id="two are worth twice as much"),
        pytest.param(1, [200, 60, 60, 60], [[1, CUT - 1], [1, 73, 60]], id="four as much as there is"),
        pytest.param(1, [43, 30, 30], [[1, 43], [1, 30], [1, 30]], id="who enters with a third keeps others out"),
        pytest.param(45, [50], [[*[1] * 45, 20], [*[1] * 45, 20]], id="half of one beside any number of rows"),
    ],
)
def test_prompts_in_smaller_steps_beside_rows_that_generate(
    generating: int, lengths: list[int], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(step_tokens=STEP, mixed_tokens=40, max_running=64)
    shares = shares_of(w, monkeypatch)
    w.submit(*(request(f"d{i}", [i + 1], max_tokens=40, ignore_eos=True) for i in range(generating)))
    if generating:
        w.step()
    w.submit(*(prompt(f"p{i}", n, 10 * i + 60) for i, n in enumerate(lengths)))
    w.run()
    begun = bool(generating)
    assert shares[begun : begun + len(expected)] == expected


def test_the_smallest_budget_moves_a_prompt_on(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP, mixed_tokens=1)
    shares = shares_of(w, monkeypatch)
    w.submit(*(request(f"d{i}", [i + 1], max_tokens=9, ignore_eos=True) for i in range(3)))
    w.step()
    w.submit(prompt("p", 4, 10))
    w.run()
    assert shares[1:5] == [[1, 1, 1, 1]] * 4


def test_forced_tokens_are_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed at once, and beside them one prompt is still the only one."""
    w = World(step_tokens=STEP, mixed_tokens=40)
    shares = shares_of(w, monkeypatch)
    w.submit(*(request(f"d{i}", [i + 1], max_tokens=90, ignore_eos=True) for i in range(2)))
    w.step()
    rows = w.scheduler._rows
    rows.foresee(int(rows.running[1]), list(range(10, 60)))
    w.submit(prompt("p", 100, 10))
    w.run()
    assert shares[1:4] == [[1, 51, 20], [1, 1, 38], [1, 1, 38]]


def test_forced_tokens_leave_half_of_a_step_to_a_prompt_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP)
    shares = shares_of(w, monkeypatch)
    w.submit(request("d", [1], max_tokens=300, ignore_eos=True))
    w.step()
    w.submit(prompt("p", 400, 10))
    w.step()
    rows = w.scheduler._rows
    rows.foresee(int(rows.running[0]), [k % 90 + 1 for k in range(150)])
    w.run()
    # The last of the row's tokens is one that was sampled.
    assert shares[1:5] == [[1, STEP - 1], [80, 80], [71, 89], [1, 72]]


def test_nobody_makes_room_for_who_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP, policy="priority", cells=600)
    shares = shares_of(w, monkeypatch)
    w.submit(request("c", [1], max_tokens=40, ignore_eos=True, priority=1))
    w.step()
    w.submit(prompt("b", 400, 10))
    w.step()
    w.submit(prompt("a", 505, 20, priority=1))
    w.run()
    assert shares[:4] == [[1], [1, STEP - 1], [1, CUT - 1], [1, 114]] and not w.scheduler.stats().retracted


def test_nobody_makes_room_for_who_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP, policy="priority")
    shares = shares_of(w, monkeypatch)
    w.submit(prompt("b", STEP + CUT + 116, 10))
    w.step()
    w.submit(prompt("a", 142, 20, priority=1))
    w.step()
    w.scheduler.receive(Abort(["a"]))
    w.submit(prompt("short", 8, 30, priority=1))
    w.run()
    assert shares == [[STEP], [CUT], [116, 8]] and not w.scheduler.stats().retracted


def test_prompts_get_on_while_nearly_all_of_the_budget_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    w = World(step_tokens=STEP, max_running=STEP, cells=8192)
    shares = shares_of(w, monkeypatch)
    w.submit(*(request(f"d{i}", [i % 90 + 1], max_tokens=60, ignore_eos=True) for i in range(STEP - 4)))
    w.step()
    w.submit(prompt("a", 40, 10))
    w.run()
    beside = [share[-1] for share in shares[1:] if len(share) == STEP - 3]
    assert beside == [4] * 9 + [3]  # its first token is in the tree


@pytest.mark.parametrize(
    ("policy", "priority", "expected"),
    [
        pytest.param("priority", 1, [[STEP], [CUT], [142], [116]], id="who is cut makes room for a higher priority"),
        pytest.param("priority", 0, [[STEP], [CUT], [116], [142]], id="not for the same"),
        pytest.param("fcfs", 1, [[STEP], [CUT], [116], [142]], id="nor where priorities mean nothing"),
    ],
)
def test_a_prompt_of_higher_priority(
    policy: str, priority: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = World(step_tokens=STEP, policy=policy)
    shares = shares_of(w, monkeypatch)
    w.submit(prompt("long", STEP + CUT + 116, 10))
    w.step()
    w.submit(prompt("urgent", 142, 20, priority=priority))
    w.run()
    assert shares == expected


def test_who_wants_no_token_gets_none_where_a_prompt_ends_with_one_token_alone() -> None:
    """The last chunk looks like a decode: one token is lacking, and nothing else runs."""
    world = World(step_tokens=4, max_running=2)
    world.submit(request("scored", range(1, 6), max_tokens=0, prompt_logprobs=0))
    world.run()
    assert world.readers["scored"].tokens == [] and world.readers["scored"].finish == Finish("length")
    world = World(step_tokens=4, max_running=2, model=msgspec.structs.replace(MODEL, context_length=9))
    world.submit(msgspec.structs.replace(request("pooled", range(1, 10)), pooling=PoolingParams()))
    world.run()
    assert world.readers["pooled"].tokens == [] and world.readers["pooled"].finish is not None
