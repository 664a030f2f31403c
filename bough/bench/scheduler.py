"""``bough bench scheduler``: host time per step, with a device whose results are there at once.

Requests generate for ever, one step after the other is timed: what is left is what the host column costs
for that many running rows, that many waiting requests and that many tokens in the tree.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.bench.measures import Figures, percentile, table

if TYPE_CHECKING:
    from bough.base.messages import Request
    from bough.base.plan import Ints, Masks, StepPlan, StepResult
    from bough.kv.manager import KVManager
    from bough.scheduler.loop import Scheduler

PROMPT, CONTEXT, VOCAB = 128, 4096, 32_000
"""Tokens of a prompt, of the longest sequence, and of the vocabulary."""
LEAF = 1000
"""Tokens of each finished request that fills the tree."""
COLUMNS = ("step_us_p50", "step_us_p99", "turnover_us_p50", "turnover_us_p99")


def configure(parser: argparse.ArgumentParser) -> None:
    """The grid; every combination is measured."""
    add = parser.add_argument
    add(
        "--running",
        type=_counts,
        default=(1, 64, 256, 1024),
        metavar="LIST",
        help="running rows (default: 1,64,256,1024)",
    )
    add("--waiting", type=_counts, default=(0, 10_000), metavar="LIST", help="waiting requests (default: 0,10000)")
    add(
        "--tree", type=_counts, default=(10_000, 100_000, 1_000_000), metavar="LIST",
        help="tokens in the tree (default: 10000,100000,1000000)",
    )  # fmt: skip
    add("--steps", type=int, default=200, metavar="INT", help="timed steps of each kind (default: %(default)s)")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True, slots=True)
class Instant:
    """An Executor that has computed every plan before it is asked to: token 1 for every row that samples."""

    def forward(self, plan: StepPlan) -> Done:
        return Done(plan)

    def sample(self, forward: Done, masks: Masks | None) -> Done:
        return forward

    def shutdown(self) -> None:
        """Nothing runs."""


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is over."""

    plan: StepPlan

    def result(self) -> StepResult:
        import numpy as np

        from bough.base.plan import StepResult

        counts = self.plan.sample.astype(np.int32)
        return StepResult(self.plan.step, np.ones(int(counts.sum()), np.int32), counts)


class Bench:
    """One cell of the grid: a scheduler with ``running`` rows taken, ``waiting`` requests and a filled tree."""

    def __init__(self, running: int, waiting: int, tree: int) -> None:
        import numpy as np

        from bough.base.config import ScheduleConfig
        from bough.base.limits import DEFAULT_LIMITS
        from bough.base.messages import ModelInfo
        from bough.kv.manager import KVManager
        from bough.scheduler.loop import Scheduler

        model = ModelInfo(
            name="none", path="", architecture="none", vocab_size=VOCAB, context_length=CONTEXT, eos_ids=(0,),
            dtype="none", n_parameters=0,
        )  # fmt: skip
        self.running = running
        self.rng = np.random.default_rng(0)
        self.numbers = itertools.count()
        self.running_rid = ""
        # Room for every row at its full length, so that nothing is retracted or evicted while steps are timed.
        self.kv: KVManager = KVManager(
            n_tokens=tree + running * CONTEXT, page_size=1, n_rows=running, max_len=CONTEXT, eviction="lru",
            cache="radix",
        )  # fmt: skip
        self.scheduler: Scheduler = Scheduler(
            ScheduleConfig(max_running=running, step_tokens=max(8192, running), depth=1),
            replace(DEFAULT_LIMITS, queue_requests=waiting + running + tree // LEAF + 1, queue_tokens=1 << 40),
            model,
            self.kv,
            Instant(),
            clock=time.perf_counter,
            draw=lambda: 1,
            stop_matcher=_no_matcher,
        )
        self._fill(tree)
        self._start(running, waiting)

    def _request(self, ids: Ints, tokens: int) -> Request:
        from bough.base.messages import Request
        from bough.base.params import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Request(rid=str(next(self.numbers)), ids=ids.tobytes(), params=params)

    def _random(self, length: int) -> Ints:
        return self.rng.integers(2, VOCAB, length).astype("<i4")

    def _fill(self, tree: int) -> None:
        for _ in range(tree // LEAF):
            self.scheduler.receive(self._request(self._random(LEAF - 1), 1))
        while not self.scheduler.idle:
            self.scheduler.step()
        self.scheduler.outbox.clear()

    def _start(self, running: int, waiting: int) -> None:
        """Prompts share their first half with 15 others, so that the queue has something to order by."""
        heads = [self._random(PROMPT // 2) for _ in range((running + waiting) // 16 + 1)]
        for i in range(running + waiting):
            prompt = self._random(PROMPT)
            prompt[: PROMPT // 2] = heads[i % len(heads)]
            self.scheduler.receive(self._request(prompt, CONTEXT - PROMPT))
        while self.scheduler.stats().running < running:
            self.scheduler.step()
        for _ in range(20):
            self.step()

    def step(self) -> float:
        """Seconds of one step; ``running_rid`` is then a request that has a row, or empty if that is unknown."""
        from bough.base.messages import Outputs

        start = time.perf_counter()
        self.scheduler.step()
        seconds = time.perf_counter() - start
        news = [o for m in self.scheduler.outbox if isinstance(m, Outputs) for o in m.items if o.finish is None]
        self.running_rid = news[0].rid if news else ""
        self.scheduler.outbox.clear()
        return seconds

    def turnover(self) -> float:
        """Seconds that it takes to end a request and go on: one step, or with a single row those until it moves again.

        The row is given anew in the step after the one in flight, so in a series each step has one of each.
        """
        from bough.base.messages import Abort

        start = time.perf_counter()
        self.scheduler.receive(Abort([self.running_rid]))
        seconds = time.perf_counter() - start + self.step()
        while not self.running_rid:
            seconds += self.step()
        return seconds

    def measure(self, steps: int) -> Figures:
        """Steps in which every row decodes; then steps in which one request ends and another takes its row."""
        figures = _spread("step", [self.step() for _ in range(steps)])
        before = self.scheduler.stats()
        assert before.running == self.running and before.retracted == 0
        if before.waiting:
            changes = min(steps, before.waiting)
            figures |= _spread("turnover", [self.turnover() for _ in range(changes)])
            assert self.scheduler.stats().aborted - before.aborted == changes
        return figures | {"tree_tokens": before.tree_tokens}


def _no_matcher(params: object) -> Any:
    raise AssertionError("these requests have no stop strings")


def _spread(name: str, seconds: list[float]) -> Figures:
    return {f"{name}_us_p{q}": round(percentile(seconds, q) * 1e6, 1) for q in (50, 99)}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure the grid."""
    cells = []
    for tree, waiting, running in itertools.product(arguments.tree, arguments.waiting, arguments.running):
        bench = Bench(running, waiting, tree)
        gc.collect()
        figures = bench.measure(arguments.steps)
        cells.append({"running": running, "waiting": waiting, "tree": tree, **figures})
        shown = " ".join(f"{c}={figures[c]:g}" for c in COLUMNS if c in figures)
        print(f"{running} running, {waiting} waiting, {tree} tokens: {shown}", file=sys.stderr, flush=True)
    return {"steps": arguments.steps, "cells": cells}


def summary(result: dict[str, Any]) -> str:
    """Microseconds per step as a table."""
    rows = {f"{c['running']} running, {c['waiting']} waiting, {c['tree']} tokens": c for c in result["cells"]}
    return "host time per step, in microseconds\n\n" + table(rows, COLUMNS, "state")


def plot(result: dict[str, Any], path: Path) -> None:
    """Median time per step over the running rows, a line for each (waiting, tree)."""
    from bough.bench.plot import lines

    groups: dict[str, tuple[list[float], list[float]]] = {}
    for c in result["cells"]:
        xs, ys = groups.setdefault(f"{c['waiting']} waiting, {c['tree']} tokens", ([], []))
        xs.append(c["running"])
        ys.append(c["step_us_p50"])
    lines(groups, "running rows", "microseconds per step", "host time per step", path)
