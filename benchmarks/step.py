"""Where the time of a step goes: decode steps of several batch sizes and a prompt, op by op and as a whole.

    python benchmarks/step.py [MODEL] [--output FILE] [--threads N] [--rows LIST] [--context N] [--quantize KIND]

Times are milliseconds, medians and minima over the steps. ``ops`` is the time inside each op of the layered path;
what is missing to ``forward`` is Python between them. ``stack`` is the path of all layers in one call, where there
is one for so many rows; the floor reads all weights once at the bandwidth that the same run has measured.
``native`` is what passes inside compiled kernels, whichever path calls them, and ``host_share`` the rest of a step:
Python, and torch's own small ops. The scheduler and the way to the server are not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bough.base.config import KVConfig
from bough.base.params import SamplingParams
from bough.base.plan import LAST, RowInit, StepPlan
from bough.bench.machine import facts
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.ops.library import Library
from bough.device.ops.registry import Ops, resolve_ops
from bough.device.platform.cpu import CpuPlatform
from bough.device.quant.scheme import resolve_scheme
from bough.engine.text import load_text
from bough.weights.fetch import resolve as fetch
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from bough.worker.worker import Worker

NONE = np.zeros(0, np.int32)
STEPS = 40
PROMPT, CHUNK = 2048, 512


class Timed:
    """Ops that add up the seconds spent in each; without the op for all layers unless ``stack``."""

    def __init__(self, ops: Ops, stack: bool) -> None:
        self._ops, self._stack = ops, stack
        self.seconds: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ops, name)
        if name == "layer_stack":
            return found if self._stack else lambda *arguments: None
        if name == "packed_linear":
            return lambda weight, bias: TimedLinear(self, found(weight, bias), f"linear {weight.n_in}x{weight.n_out}")
        return found if name in ("name", "reason") else lambda *arguments: self.timed(name, found, arguments)

    def timed(self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return result


class Native:
    """Adds up the seconds inside the functions of the compiled library that are taken while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Native:
        found = Library.function
        self._patch = patch.object(Library, "function", lambda library, name: self.timed(found(library, name)))
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return call


class TimedLinear:
    """One packed linear layer of :class:`Timed`."""

    def __init__(self, ops: Timed, call: Any, name: str) -> None:
        self._ops, self._call, self._name = ops, call, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._ops.timed(self._name, self._call, arguments)


def make_worker(arguments: argparse.Namespace, ops: Timed, n_rows: int) -> Worker:
    checkpoint = open_checkpoint(fetch(arguments.model, None))
    tokenizer, _ = load_text(checkpoint.tokenizer_source)
    platform = CpuPlatform(arguments.threads)
    scheme = resolve_scheme(arguments.quantize, ops, torch.bfloat16, platform.features())
    context = LayerContext(checkpoint, ops, scheme, PagedAttention(ops), torch.bfloat16, platform.device)
    length = max(arguments.context + STEPS, PROMPT) + 8
    kv = KVConfig(pool_tokens=n_rows * length + 64)
    sizes = WorkerSizes(n_ids=tokenizer.vocab_size, context_length=length, n_rows=n_rows)
    return build_worker(checkpoint.config, context, sizes, kv, platform.free_memory).worker


class Driver:
    """Writes the plans of rows that all have the same length."""

    def __init__(self, worker: Worker, native: Native) -> None:
        self.worker, self.native = worker, native
        self.step, self.used = 0, 0

    def run(
        self, n: int, start: int, tokens: Any, new: int, admit: int = 0, sample: bool = True
    ) -> tuple[float, float, float]:
        """One step of ``n`` rows, each computing ``new`` tokens from ``start``; seconds of forward and sampling, and
        those of both inside kernels."""
        self.step += 1
        self.native.seconds = 0.0
        greedy = SamplingParams(temperature=0.0)
        admitted = tuple(
            RowInit(row, NONE, np.full(admit, 1, np.int32), admit, greedy, row, (), admit)
            for row in range(n if admit else 0)
        )
        plan = StepPlan(
            step=self.step, released=NONE, admitted=admitted, rows=np.arange(n, dtype=np.int32),
            start=np.full(n, start, np.int32), n_new=np.full(n, new, np.int32), tokens=np.asarray(tokens, np.int32),
            out_loc=np.arange(self.used, self.used + n * new, dtype=np.int32), sample=np.full(n, sample),
        )  # fmt: skip
        self.used += n * new
        began = time.perf_counter()
        handle = self.worker.forward(plan)
        middle = time.perf_counter()
        self.worker.sample(handle)
        return middle - began, time.perf_counter() - middle, self.native.seconds


def decode(worker: Worker, ops: Timed, native: Native, n: int, context: int) -> dict[str, Any]:
    driver, rng = Driver(worker, native), np.random.default_rng(0)
    driver.run(n, 0, rng.integers(100, 10000, n * context), context, admit=context)
    for i in range(4):
        driver.run(n, context + i, [LAST] * n, 1)
    ops.seconds.clear()
    times = [driver.run(n, context + 4 + i, [LAST] * n, 1) for i in range(STEPS - 4)]
    return figures(times, ops, len(times))


def prefill(worker: Worker, ops: Timed, native: Native) -> dict[str, Any]:
    tokens, results = np.random.default_rng(1).integers(100, 10000, PROMPT), []
    for _ in range(3):
        driver = Driver(worker, native)
        ops.seconds.clear()
        parts = [
            driver.run(1, at, tokens[at : at + CHUNK], CHUNK, PROMPT if at == 0 else 0, at + CHUNK == PROMPT)
            for at in range(0, PROMPT, CHUNK)
        ]
        results.append(figures([tuple(map(sum, zip(*parts)))], ops, 1))
    return min(results, key=lambda r: float(r["forward_ms"]))


def figures(times: list[Any], ops: Timed, n: int) -> dict[str, Any]:
    forward, sampling, native = ([t[i] * 1e3 for t in times] for i in range(3))
    parts = {name: round(s / n * 1e3, 3) for name, s in sorted(ops.seconds.items(), key=lambda item: -item[1])}
    return {
        "forward_ms": round(statistics.median(forward), 3), "forward_min_ms": round(min(forward), 3),
        "sample_ms": round(statistics.median(sampling), 3), "sample_min_ms": round(min(sampling), 3),
        "native_ms": round(statistics.median(native), 3),
        "host_share": round(1 - sum(native) / (sum(forward) + sum(sampling)), 3), "ops_ms": parts,
    }  # fmt: skip


def read_bandwidth() -> float:
    """GB/s of summing up more than any cache holds, best of some."""
    big, best = torch.ones(64 << 20), float("inf")
    for _ in range(15):
        began = time.perf_counter()
        big.sum()
        best = min(best, time.perf_counter() - began)
    return big.nbytes / best / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--quantize", default="none")
    arguments = parser.parse_args()
    rows = [int(n) for n in arguments.rows.split(",")]
    result: dict[str, Any] = {"machine": facts(), "context": arguments.context, "quantize": arguments.quantize}
    for stack in (True, False):
        with Native() as native:
            ops = Timed(resolve_ops("auto"), stack)
            worker = make_worker(arguments, ops, max(rows))
        result["read_gb_s"] = round(read_bandwidth(), 1)
        with torch.inference_mode():
            name = "stack" if stack else "layered"
            result[name] = {str(n): decode(worker, ops, native, n, arguments.context) for n in rows}
            if not stack:
                result["prefill"] = prefill(worker, ops, native)
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
