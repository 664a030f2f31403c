"""Decode and prefill of the engine as shares of what the machine could do."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu.limits import Limits
from benchmarks.gpu.play import ALL, Ask, Engine, Features, random_ids
from benchmarks.gpu.shapes import Shape

ANSWER = 64
"""Tokens that each row decodes."""


def decode(
    engine: Engine, shape: Shape, limits: Limits, batch: int, context: int, features: Features = ALL,
    answer: int = ANSWER,
) -> dict[str, Any]:  # fmt: skip
    """``batch`` rows from ``context`` on: tokens per second from when all of them decode until the first has ended."""
    rng = np.random.default_rng(batch)
    asks = [Ask(random_ids(rng, context, shape.vocab_size), answer) for _ in range(batch)]
    played = engine.play(asks, features)
    begin = max(told.stamps[0] for told in played.told)
    end = min(told.stamps[-1] for told in played.told)
    counted = sum(sum(begin < stamp <= end for stamp in told.stamps) for told in played.told)
    rate = counted / (end - begin) if end > begin else 0.0
    # Half way through, a row has the prompt and half of its answer.
    cells = batch * (context + answer / 2)
    read = 2 * shape.read_parameters
    floor = limits.seconds(read, read * batch) + limits.seconds(cells * shape.kv_bytes, 0)
    return {
        "tokens_per_s": round(rate, 1),
        "roofline": round(batch / floor, 1),
        "share": round(rate * floor / batch, 4),
        "gpu_busy": round(played.device_seconds / played.seconds, 4),
        "gpu_stalled": round(played.stalled, 4),
        "host_step_ms": round(1e3 * played.host_seconds, 3),
        "errors": len(played.errors),
    }


def prefill(engine: Engine, shape: Shape, limits: Limits, n: int, repeats: int = 3) -> dict[str, Any]:
    """One prompt of ``n`` new tokens until its first answer."""
    rng = np.random.default_rng(n)
    seconds = []
    for _ in range(repeats):
        played = engine.play([Ask(random_ids(rng, n, shape.vocab_size), 1)])
        seconds.append(played.told[0].stamps[0] - played.told[0].began)
    taken = statistics.median(seconds)
    layers = 2.0 * n * (shape.read_parameters - shape.head_parameters)
    floor = limits.seconds(2 * shape.read_parameters, layers + 2 * shape.head_parameters + shape.attention_flops(n, n))
    return {
        "tokens_per_s": round(n / taken, 1),
        "roofline": round(n / floor, 1),
        "share": round(floor / taken, 4),
        "ttft_ms": round(1e3 * taken, 3),
    }


def features() -> Iterator[tuple[str, Features]]:
    """All on, then each off."""
    yield "all", ALL
    yield "no radix", Features(radix=False)
    yield "no cascade", Features(cascade=False)
    yield "no overlap", Features(overlap=False)
    yield "no jump", Features(jump=False)
