"""A moment's wait for whoever was just answered: made where it pays, and never for long."""

from __future__ import annotations

import pytest

from bough.scheduler.anticipation import LEAST, LONGEST, SAVED, SHARE, STEP_SHARE, Anticipation
from bough.scheduler.costs import Costs

from .world import World, request

STEP = 0.02


class Days:
    """Steps of ``STEP`` seconds on a clock; what is waited for, in all."""

    def __init__(self, seconds: float = STEP) -> None:
        costs = Costs()
        costs.step(seconds, n_tokens=8, n_rows=8)
        self.anticipation = Anticipation(costs)
        self.now, self.seconds, self.answered, self.waited = 0.0, seconds, 0, 0.0

    def step(self, answered: bool = False, wanted: bool = True, comes_after: float | None = None) -> float:
        """One step, and the wait behind it, which ends with who ``comes_after`` so many seconds; what it was to be."""
        self.anticipation.begin(self.now)
        self.now += self.seconds
        self.answered += answered
        self.anticipation.end(self.now, self.seconds, self.answered, lambda: wanted)
        patience = self.anticipation.patience
        came = comes_after is not None and comes_after <= patience
        wait = comes_after if comes_after is not None and came else patience
        if came:
            self.anticipation.arrived()
        self.now += wait
        self.waited += wait
        return patience


def test_who_was_answered_is_waited_for_while_others_go_on() -> None:
    days = Days()
    assert not any(days.step() for _ in range(20))
    assert days.step(answered=True) == pytest.approx(STEP_SHARE * STEP)
    assert days.step() == 0
    assert days.step(answered=True, wanted=False) == 0


def test_long_steps_do_not_make_long_waits() -> None:
    days = Days(seconds=1.0)
    assert days.step(answered=True) == LONGEST


@pytest.mark.parametrize("comes_after", [0.004, None])
def test_waits_take_their_share_of_the_time_at_most(comes_after: float | None) -> None:
    days = Days()
    for _ in range(10_000):
        days.step(answered=True, comes_after=comes_after)
    steps = days.now - days.waited
    most = SHARE if comes_after else SHARE * LEAST
    assert most * 0.9 <= days.waited / steps <= most * 1.1 + SAVED / steps


def test_whoever_comes_again_is_noticed_after_long_silence() -> None:
    days = Days()
    for _ in range(1000):
        days.step(answered=True)
    waits = [days.step(answered=True, comes_after=0.002) for _ in range(1000)]
    assert sum(wait > 0 for wait in waits[-100:]) > 2 * sum(wait > 0 for wait in waits[:100])


def test_a_wait_that_went_on_while_nothing_ran_counts_as_what_it_was_to_be() -> None:
    days = Days()
    for _ in range(100):
        days.step()
    days.step(answered=True)
    days.now += 3600
    for _ in range(5):
        days.step()
    assert days.step(answered=True) > 0


def test_nobody_is_waited_for_who_would_not_enter_the_next_step() -> None:
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
    world.run()
    assert not planner.open()
