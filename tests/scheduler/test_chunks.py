"""How the tokens of a step are shared out among prompts."""

from __future__ import annotations

from bough.base.messages import Request
from bough.scheduler.planner import Flight

from .world import World, request

STEP, CUT = 160, 128
"""The budget of a step, and what a prompt gets of it that goes on in the next one."""


class Steps(World):
    """Writes down how many tokens each row computes, step by step."""

    def __init__(self, **options: object) -> None:
        super().__init__(step_tokens=STEP, **options)  # type: ignore[arg-type]
        self.shares: list[list[int]] = []
        planner = self.scheduler._planner
        plan = planner.next

        def watched(settled: bool) -> Flight | None:
            flight = plan(settled)
            if flight is not None:
                self.shares.append(flight.plan.n_new.tolist())
            return flight

        planner.next = watched  # type: ignore[method-assign]


def prompt(name: str, n: int, first: int) -> Request:
    return request(name, [first + i % 7 for i in range(n)], max_tokens=1)


def test_the_end_of_a_prompt_needs_no_step_of_its_own() -> None:
    w = Steps()
    w.submit(prompt("a", CUT + 142, 10))
    w.run()
    assert w.shares == [[CUT], [142]]


def test_prompts_that_end_share_a_step_and_who_would_only_begin_waits() -> None:
    w = Steps()
    w.submit(*(prompt(name, 70, first) for name, first in (("a", 10), ("b", 20), ("c", 30))))
    w.run()
    assert w.shares == [[70, 70], [70]]


def test_one_prompt_is_cut_and_shorter_ones_end_in_the_reserve() -> None:
    w = Steps()
    w.submit(prompt("a", 400, 10), prompt("b", 30, 20), prompt("c", 90, 30))
    w.run()
    assert w.shares == [[CUT, 30], [CUT], [144], [90]]


def test_prompts_get_on_while_nearly_all_of_the_budget_is_decoded() -> None:
    w = Steps(max_running=STEP, cells=8192)
    w.submit(*(request(f"d{i}", [i % 90 + 1], max_tokens=60, ignore_eos=True) for i in range(STEP - 4)))
    w.step()
    w.submit(prompt("a", 40, 10))
    w.run()
    beside = [share[-1] for share in w.shares[1:] if len(share) == STEP - 3]
    assert beside == [4] * 9 + [3]  # its first token is in the tree
