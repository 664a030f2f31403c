"""Replays of programs: the clairvoyant cache against every other order of eviction, and a benchmark's whole way."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bough.bench.programs import POLICIES
from bough.cli.main import main
from bough.scheduler.loop import Scheduler
from bough.sim.clairvoyant import clairvoyant_hits
from bough.sim.clocked import Cost
from bough.sim.programs import Call, Entry, Replay, Result, Setting, Task, agents

PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=6)


def entries(paths: list[list[int]]) -> list[Entry]:
    """Prompts whose tokens stand for prefixes, as those of a replay do."""
    found = []
    for path in paths:
        ids = [1]
        for step in path:
            ids.append(2 * ids[-1] + step)
        found.append(Entry(np.array(ids, np.int32), np.empty(0, np.int32)))
    return found


def best(paths: list[Entry], room: int) -> int:
    """Most hits of any choice of what to keep beside each request, one after the other."""
    states = {frozenset[int](): 0}
    for entry in paths:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            prompt = entry.ids.tolist()
            n = next((i for i, t in enumerate(prompt[:-1]) if t not in kept), len(prompt) - 1)
            others = sorted(kept - set(prompt))
            for size in range(min(room - len(prompt), len(others)) + 1):
                for chosen in itertools.combinations(others, size):
                    state = frozenset([*prompt, *chosen])
                    after[state] = max(after.get(state, 0), hits + n)
        states = after
    return max(states.values())


@settings(max_examples=60, deadline=None)
@example([[1, 0], [1, 1], [0, 0, 0], [1, 0], [1, 1, 0]], 6)
@example([[0, 0], [1, 0], [0], [0, 0, 0]], 4)
@example([[0, 0], [0], [1, 0], [0, 0, 0]], 4)
@given(PATHS, st.integers(4, 7))
def test_nobody_hits_more_than_the_clairvoyant(paths: list[list[int]], room: int) -> None:
    found = entries(paths)
    log = [(begins, i) for i in range(len(found)) for begins in (True, False)]
    assert clairvoyant_hits(found, log, room) == best(found, room)


def test_what_runs_stays() -> None:
    """What is running cannot be given up for what comes sooner."""
    found = entries([[0, 0], [1, 1], [0, 0]])
    apart = [(True, 0), (False, 0), (True, 1), (False, 1), (True, 2)]
    together = [(True, 0), (True, 1), (False, 1), (False, 0), (True, 2)]
    assert clairvoyant_hits(found, apart, 3) == 1 + 1
    assert clairvoyant_hits(found, together, 3) == 1 + 2


def test_a_replay_waits_for_who_comes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed() -> Result:
        tasks = [
            Task(f"{i}", [Call(np.full(40 * k, i, np.int32), np.full(8, i, np.int32), 0.004) for k in range(1, 9)])
            for i in range(6)
        ]
        cost = Cost(step=0.02, token=1e-3, row=1e-3)
        return Replay(tasks, Setting(1 << 14, "lpm", "lru", cost, open_programs=6, step_tokens=128)).run()

    patient = replayed()
    monkeypatch.setattr(Scheduler, "patience", lambda self: 0.0)
    hasty = replayed()
    assert patient.busy <= patient.seconds < 0.98 * hasty.seconds


def test_the_benchmark_replays_a_trace(tmp_path: Path) -> None:
    records = [
        {"timestamp": 1000 * turn + 10 * session, "session": session, "kind": "t", "turn": turn, "last": turn == 3,
         "input_length": 64 * (turn + 1), "output_length": 16,
         "hash_ids": list(range(100 * session, 100 * session + 4 * (turn + 1)))}
        for session in range(6) for turn in range(4)
    ]  # fmt: skip
    with gzip.open(tmp_path / "agents_lmcache_k16_blk16.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    assert [len(task.calls) for task in agents(records, 16, 16)] == [4] * 6
    out = tmp_path / "out.json"
    flags = ["--traces", str(tmp_path), "--workloads", "agents", "--programs", "4", "--shares", "40,100"]
    assert main(["bench", "programs", *flags, "--output", str(out)]) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(c["share"], c["policy"]) for c in cells] == [(s, p) for s in (40, 100) for p in POLICIES]
    for cell in cells:
        assert cell["n_programs"] == 6 and 0 <= cell["hit_rate"] <= cell["clairvoyant"] < 1
    whole = [c for c in cells if c["share"] == 100]
    assert all(c["hit_rate"] > 0.5 for c in whole)
