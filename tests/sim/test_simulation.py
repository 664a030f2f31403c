"""Many schedules with all invariants, and that a schedule is a function of its seed.

Replay a failure with ``python -m tests.sim SEED``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bough.sim.device import mix

from .invariants import mix_all
from .planted import BY_NAME, planted
from .replay import failure, shrink
from .script import storm, windowed, write
from .simulation import Simulation, run

ROOT = Path(__file__).parents[2]
FAST, SLOW, BATCH = 600, 20_000, 100


def passes(seeds: range) -> None:
    for seed in seeds:
        found = failure(write(seed))
        assert found is None, f"python -m tests.sim {seed}: step {found.step}, {found.text}"


@pytest.mark.parametrize("begin", range(0, FAST, BATCH))
def test_schedules(begin: int) -> None:
    passes(range(begin, begin + BATCH))


@pytest.mark.slow
@pytest.mark.parametrize("begin", range(FAST, FAST + SLOW, 20 * BATCH))
def test_more_schedules(begin: int) -> None:
    passes(range(begin, begin + 20 * BATCH))


@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_storms_of_adapters(count: int) -> None:
    for seed in range(count):
        found = failure(storm(seed))
        assert found is None, f"storm({seed}): step {found.step}, {found.text}"


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_schedules_with_windows(count: int) -> None:
    for seed in range(count):
        found = failure(windowed(seed))
        assert found is None, f"windowed({seed}): step {found.step}, {found.text}"


def test_a_seed_gives_one_history() -> None:
    assert [run(write(seed)) for seed in range(40)] == [run(write(seed)) for seed in range(40)]


def test_the_history_does_not_depend_on_hashes() -> None:
    """Sets and dicts of strings change their order from process to process; the schedules do not."""
    code = (
        "from tests.sim.script import write; from tests.sim.simulation import run\n"
        "print([run(write(seed)) for seed in range(25)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True, timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said[0] == said[1] != ""


def test_the_schedules_go_where_it_hurts() -> None:
    """Nothing that the simulation is for happens never: retraction, faults, splits, evictions, every ending."""
    endings: set[tuple[str, int]] = set()
    retracted = evicted = cached = recovered = forced = overtaken = 0
    for seed in range(150):
        simulation = Simulation(write(seed))
        simulation.run()
        stats = simulation.scheduler.stats()
        retracted += stats.retracted
        evicted += stats.evicted_tokens
        cached += stats.cached_tokens
        recovered += len(simulation.pipeline.failures)
        forced += simulation.scheduler._constraints.forced_tokens
        overtaken += simulation.pipeline.late.overtaken
        endings |= {(r.finish.kind, r.finish.status) for r in simulation.ended if r.finish is not None}
    counts = (retracted, evicted, cached, recovered, forced, overtaken)
    assert min(counts) > 20, counts
    assert endings >= {
        ("stop", 200), ("length", 200), ("abort", 200), ("timeout", 408),
        ("error", 400), ("error", 429), ("error", 500),
    }  # fmt: skip


def test_the_vectorised_hash_is_the_device_s() -> None:
    states = [0, 1, (1 << 64) - 1, 0xDEADBEEF12345678]
    got = mix_all(np.array(states, np.uint64), np.arange(4, dtype=np.uint64))
    assert got.tolist() == [mix(state, value) for value, state in enumerate(states)]


def test_shrinking_keeps_the_failure_and_drops_the_rest() -> None:
    with planted(BY_NAME["chunk_loses_a_token"]):
        script, found = next((s, f) for s in map(write, range(50)) if (f := failure(s)) is not None)
        small = shrink(script, found.kind)
        again = failure(small)
    assert again is not None and again.kind == found.kind
    assert len(small.events) <= 2 < len(script.events)
