"""A moment's wait for whoever was just answered: made where it pays, and never for long."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import Abort, Namespace, Prefetch, Waits
from bough.base.program import Program
from bough.grammar.compiler import GrammarCompiler
from bough.scheduler.anticipation import LEAST, LONGEST, SAVED, SHARE, STEP_SHARE, Anticipation
from bough.scheduler.costs import Costs
from bough.sim.clocked import Cost
from tests.sim import grammar

from .world import World, request

STEP = 0.02


class Days:
    """Steps of ``seconds`` each on a clock, and what is waited between them."""

    def __init__(self, seconds: float = STEP) -> None:
        costs = Costs()
        costs.step(seconds, n_tokens=8, n_rows=8)
        self.now, self.seconds = 100.0, seconds
        self.anticipation = Anticipation(costs, self.now)
        self.waits: list[float] = []

    def pass_quietly(self, steps: int = 1000) -> None:
        for _ in range(steps):
            assert self.step(answered=False) == 0

    def step(
        self,
        answered: bool = True,
        wanted: bool = True,
        comes_after: float | None = None,
        program: Program | None = None,
    ) -> float:
        """One step, and the wait behind it, which ends with who ``comes_after`` so many seconds; what it was to be."""
        anticipation = self.anticipation
        self.now += self.seconds
        if answered:
            anticipation.answered(program)
        patience = anticipation.left(self.now, lambda: wanted)
        came = comes_after is not None and comes_after <= patience
        wait = comes_after if comes_after is not None and came else patience
        self.now += wait
        if came:
            anticipation.arrived()
        if patience:
            self.waits.append(wait)
            assert anticipation.left(self.now, lambda: wanted) == 0
        return patience


def test_who_was_answered_is_waited_for_once() -> None:
    days = Days()
    days.pass_quietly()
    assert days.step() == pytest.approx(STEP_SHARE * STEP)
    assert days.step(answered=False) == 0


def test_nobody_is_waited_for_who_would_find_no_place() -> None:
    days = Days()
    days.pass_quietly()
    assert days.step(wanted=False) == 0
    assert days.step(answered=False) == 0, "that one's moment is over"
    assert days.step() > 0


def test_who_is_known_to_stay_away_is_not_waited_for() -> None:
    days = Days()
    days.pass_quietly()
    assert days.step(program=Program(id="p", end=True)) == 0
    assert days.step(program=Program(id="p", pause=1.0)) == 0
    assert days.step(program=Program(id="p", pause=0.0)) > 0
    assert days.step(program=Program(id="p")) > 0


def test_long_steps_do_not_make_long_waits_and_very_short_ones_none() -> None:
    long, short = Days(seconds=1.0), Days(seconds=0.0015)
    for days in (long, short):
        days.pass_quietly()
    assert long.step() == LONGEST
    assert short.step() == 0


def test_a_wait_goes_on_behind_what_is_no_request_until_it_is_over_or_of_no_use() -> None:
    days = Days()
    days.pass_quietly()
    anticipation = days.anticipation
    anticipation.answered(None)
    begun = anticipation.left(days.now, lambda: True)
    assert anticipation.left(days.now + 0.001, lambda: True) == pytest.approx(begun - 0.001)
    assert anticipation.left(days.now + 0.002, lambda: False) == 0, "an abort has left nobody who goes on"
    assert anticipation._likely == 1, "which says nothing of who comes"
    assert anticipation.left(days.now + 0.003, lambda: True) == 0


@pytest.mark.parametrize("comes_after", [0.004, None])
def test_waits_take_their_share_of_the_time_at_most(comes_after: float | None) -> None:
    days = Days()
    began = days.now
    for _ in range(10_000):
        days.step(comes_after=comes_after)
    share = SHARE if comes_after else SHARE * LEAST
    assert share * 0.9 <= sum(days.waits) / (days.now - began) <= share * 1.1
    counted = days.anticipation.waits
    assert (counted.ended, counted.seconds) == (len(days.waits), pytest.approx(sum(days.waits)))
    assert counted.worth == (len(days.waits) if comes_after else 0)


def test_what_is_saved_up_ends() -> None:
    days = Days()
    days.pass_quietly(100_000)
    while days.step(comes_after=0.008):
        pass
    assert sum(days.waits) <= SAVED + SHARE * len(days.waits) * (STEP + 0.008)


def test_waits_that_are_longer_than_they_were_to_be_count_as_long_as_they_were() -> None:
    days = Days()
    days.pass_quietly()
    days.anticipation.answered(None)
    patience = days.anticipation.left(days.now, lambda: True)
    days.now += 20 * patience  # a system that lets it wait
    assert days.anticipation.left(days.now, lambda: True) == 0
    for _ in range(100):
        assert days.step() == 0


def test_where_nobody_comes_little_is_saved_up_in_idle_time() -> None:
    days = Days()
    for _ in range(1000):
        days.step()
    days.now, days.waits = days.now + 3600, []
    for _ in range(50):
        days.step()
    assert sum(days.waits) <= LONGEST + SHARE * LEAST * 2


def test_a_machine_that_stood_still_in_a_wait_does_not_pay_for_it_for_ever() -> None:
    days = Days()
    days.pass_quietly()
    days.anticipation.answered(None)
    assert days.anticipation.left(days.now, lambda: True) > 0
    days.now += 3600
    assert days.anticipation.left(days.now, lambda: True) == 0
    days.pass_quietly(2 * int(SAVED / SHARE / STEP))
    assert days.step() > 0


def test_it_is_learnt_who_comes_again() -> None:
    days = Days()
    days.pass_quietly()
    for _ in range(1000):
        days.step()
    before = len(days.waits)
    for _ in range(1000):
        days.step(comes_after=0.002)
    again = len(days.waits)
    for _ in range(1000):
        days.step()
    assert again - before > 8 * before > 8 * (len(days.waits) - again) > 0


def test_there_is_a_place_where_others_generate_and_nobody_else_waits() -> None:
    world = World(step_tokens=16)
    planner = world.scheduler._planner
    assert not planner.open(), "nothing runs"
    world.submit(request("a", range(1, 9), max_tokens=20))
    assert not planner.open(), "another one waits"
    world.step()
    assert planner.open()
    world.submit(request("b", range(10, 50), max_tokens=20))
    while world.readers["b"].tokens == []:
        assert not planner.open(), "another one's prompt is not done"
        world.step()
    assert planner.open()
    world.submit(*(request(f"{i}", range(50, 54), max_tokens=20, ignore_eos=True) for i in range(14)))
    for _ in range(8):
        world.step()
    assert len(world.scheduler._rows) == 16 and not planner.open(), "there is no row"
    world.run()
    assert not planner.open()


def answered() -> World:
    """A world in which "b" was just answered while "a" goes on; it has had time to save up for a wait."""
    world = World(cells=8192, cost=Cost(step=STEP, token=0.0, row=0.0))
    world.submit(request("a", range(1, 9), max_tokens=400, ignore_eos=True))
    for _ in range(100):
        world.step()
    world.submit(replace(request("b", range(11, 19), max_tokens=3, ignore_eos=True), program=Program(id="p")))
    while world.readers["b"].finish is None:
        world.step()
    return world


def test_the_scheduler_waits_beside_others_for_who_was_answered() -> None:
    assert answered().scheduler.patience() == pytest.approx(STEP_SHARE * STEP)


def test_the_scheduler_does_not_wait_when_somebody_is_there() -> None:
    world = answered()
    world.submit(request("c", range(21, 29)))
    assert world.scheduler.patience() == 0

    world = answered()
    background = grammar.Background(lambda: 0)
    compiler = GrammarCompiler(grammar.FakeBackend(), DEFAULT_LIMITS, background.submit, 1, grammar.tags())
    world.scheduler._constraints._compiler = compiler
    constraint = grammar.constraint(1, delay=2)
    background.expected = constraint.text
    world.scheduler.receive(replace(request("c", [1, 2, 3]), constraint=constraint))
    assert len(world.scheduler._gates) == 1
    assert world.scheduler.patience() == 0


def test_who_comes_in_a_wait_is_counted() -> None:
    world = answered()
    anticipation = world.scheduler._anticipation
    anticipation._likely = 0.5
    assert world.scheduler.patience() > 0
    world.submit(request("c", range(21, 29)))
    assert world.scheduler.patience() == 0 and anticipation._likely > 0.5
    assert world.scheduler.stats().waits == anticipation.waits == Waits(ended=1, worth=1)


def test_suspects_of_a_failure_are_not_made_to_wait() -> None:
    world = answered()
    planner = world.scheduler._planner
    planner.suspects.append(world.scheduler._rows.req(0))
    assert not planner.open()


def test_what_runs_ahead_counts_neither_as_waiting_nor_as_going_on() -> None:
    world = answered()
    ids = np.array([*range(11, 19), *world.readers["b"].tokens, *[5] * 200], dtype="<i4").tobytes()
    world.scheduler.receive(Prefetch(ids, Namespace(), "p"))
    world.step()
    assert world.scheduler._background.running is not None
    assert world.scheduler._planner.open()
    world.scheduler.receive(Abort(["a"]))
    assert world.scheduler._background.running is not None
    assert not world.scheduler._planner.open()


def test_whoever_has_ended_does_not_go_on_in_the_step_in_flight() -> None:
    world = World(depth=1)
    world.submit(request("a", range(1, 9), max_tokens=20, stop_token_ids=tuple(range(97))))
    while world.readers["a"].finish is None:
        world.step()
    assert len(world.scheduler._rows), "its row is in flight"
    assert not world.scheduler._planner.open()
