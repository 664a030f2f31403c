"""The simulation finds bugs: every planted one, within a bounded number of schedules.

``pytest -s`` prints the table.
"""

from __future__ import annotations

import statistics
from functools import cache

import pytest

from .planted import ADAPTERS, BUGS, BY_NAME, Bug, planted
from .replay import Failure, failure
from .script import Script, storm, write

FAST_SEEDS, SLOW_SEEDS = 60, 1500
SUBTLE = (
    "truncate_frees_used_page", "undo_forgotten", "eviction_ignores_use", "budget_off_by_one",
    "ahead_goes_on_beside_a_cut", "ahead_found_where_it_was_not", "preempted_goes_last", "hold_is_never_released",
    "ahead_is_tried_again", "eviction_newest_first", "release_leaks_tail", "preempt_in_flight",
    "prompt_logprobs_off_by_one", "many_stop_ids_missed", "policy_deaf_to_changes", "timeout_of_a_reused_id",
    "row_failure_is_silent", "jump_over_min_tokens", "foreseen_counted_twice", "foreseen_appended_twice",
    "forced_tokens_without_logprobs", "budget_not_checked_on_arrival", "siblings_separated", "ahead_keeps_its_row",
    "ahead_outlives_its_program", "ahead_forgets_its_salt", "ahead_is_planned_as_a_request",
)  # fmt: skip
"""Bugs that need several conditions at once, and 20 schedules or more; they are looked for among the slow tests."""

script_of = cache(write)


def first_failure(bug: Bug, seeds: int) -> tuple[int, Failure] | None:
    """The first schedule that shows ``bug``."""
    with planted(bug):
        for seed in range(seeds):
            if (found := failure(script_of(seed))) is not None:
                return seed, found
    return None


def hunt(bugs: list[Bug], seeds: int) -> None:
    table: list[str] = []
    needed: list[int] = []
    missed: list[str] = []
    for bug in bugs:
        caught = first_failure(bug, seeds)
        if caught is None:
            missed.append(bug.name)
            continue
        seed, found = caught
        needed.append(seed + 1)
        table.append(f"{bug.name:32} {seed + 1:5}  {found.text[:70]}")
    print(f"\n{'planted bug':32} {'seeds':>5}  caught by", *table, sep="\n")
    print(f"{len(needed)} of {len(bugs)} caught, median {statistics.median(needed):g} schedules, most {max(needed)}")
    assert not missed


def test_planted_bugs_are_caught() -> None:
    bugs = [bug for bug in BUGS if bug.name not in SUBTLE]
    assert len(bugs) >= 40
    hunt(bugs, FAST_SEEDS)


@pytest.mark.parametrize("bug", ADAPTERS, ids=lambda bug: bug.name)
def test_planted_bugs_of_adapters_are_caught(bug: Bug) -> None:
    with planted(bug):
        assert any(failure(storm(seed)) for seed in range(FAST_SEEDS))


@pytest.mark.slow
def test_subtle_planted_bugs_are_caught() -> None:
    hunt([BY_NAME[name] for name in SUBTLE], SLOW_SEEDS)


def test_planting_leaves_nothing_behind() -> None:
    scripts: list[Script] = [script_of(seed) for seed in range(5)]
    for bug in BUGS:
        with planted(bug):
            pass
    assert all(failure(script) is None for script in scripts)


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(BUGS)
