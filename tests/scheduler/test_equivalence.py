"""The same tokens, logprobs and endings whatever the cache, the chunking, the depth and the company."""

from __future__ import annotations

import numpy as np
import pytest

from bough.base.messages import Request
from bough.sim.device import oracle_tokens

from .world import VOCAB, World, request


def workload(seed: int, n: int = 24) -> list[Request]:
    rng = np.random.default_rng(seed)
    stems = [rng.integers(1, VOCAB, size).tolist() for size in (5, 40, 90)]
    out = []
    for i in range(n):
        prompt = stems[int(rng.integers(3))] + rng.integers(1, VOCAB, int(rng.integers(0, 30))).tolist()
        params: dict[str, object] = {"max_tokens": int(rng.integers(1, 40)), "ignore_eos": bool(rng.integers(2))}
        if rng.random() < 0.3:
            params |= {"temperature": 1.0, "seed": int(rng.integers(1, 100))}
        if rng.random() < 0.3:
            params |= {"logprobs": 0, "prompt_logprobs": 0}
        out.append(request(f"r{i}", prompt, **params))
    return out


def expected(r: Request) -> list[int]:
    p = r.params
    stop = frozenset() if p.ignore_eos else frozenset({0})
    return oracle_tokens(r.prompt.tolist(), p.max_tokens or 0, 0, 0 if p.temperature == 0 else p.seed or 0, VOCAB, stop)


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"depth": 1},
        {"step_tokens": 16},
        {"step_tokens": 17, "depth": 1},
        {"step_tokens": 4096, "depth": 1},
        {"max_running": 1},
        {"max_running": 3, "depth": 1},
        {"policy": "fcfs"},
        {"policy": "dfs", "depth": 1},
        {"policy": "priority"},
        {"policy": "random"},
    ],
)
@pytest.mark.parametrize(
    "pool",
    [
        {},
        {"cache": "none"},
        {"page_size": 16},
        {"page_size": 4, "eviction": "arc"},
        {"cells": 180},
        {"cells": 192, "page_size": 16, "eviction": "lfu"},
        {"cells": 200, "eviction": "fifo"},
    ],
)
def test_tokens_equal_the_oracle(schedule: dict[str, object], pool: dict[str, object]) -> None:
    world = World(**{**pool, **schedule})  # type: ignore[arg-type]
    requests = workload(1)
    world.submit(*requests)
    readers = world.run()
    for r in requests:
        reader = readers[r.rid]
        assert reader.tokens == expected(r), r.rid
        assert reader.finish is not None and reader.finish.kind in ("stop", "length")
        if r.params.logprobs is not None:
            assert len(reader.logprobs) == len(reader.tokens)
            assert len(reader.prompt_logprobs) == len(r.prompt) - 1
            assert [p.token for p in reader.prompt_logprobs] == r.prompt.tolist()[1:]
    world.scheduler.check()


def test_retraction_really_happens_and_changes_nothing() -> None:
    world = World(cells=150, step_tokens=64)
    requests = workload(2, n=12)
    world.submit(*requests)
    readers = world.run()
    assert world.scheduler.stats().retracted > 0
    assert all(readers[r.rid].tokens == expected(r) for r in requests)


def test_a_shared_prefix_is_computed_once() -> None:
    rng = np.random.default_rng(0)
    stem = rng.integers(1, VOCAB, 200).tolist()
    world = World(cells=8192, max_running=128, step_tokens=512)
    suffixes = [rng.integers(1, VOCAB, 7).tolist() for _ in range(100)]
    world.submit(*(request(f"r{i}", stem + s, max_tokens=1) for i, s in enumerate(suffixes)))
    world.run()
    distinct = len({tuple(s[: k + 1]) for s in suffixes for k in range(7)})
    assert world.device.computed_tokens <= 200 + distinct + 100
