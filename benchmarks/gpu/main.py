"""Runs the sections one after the other, as far as the time goes, and writes down each row as it comes."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu import checks, kernels, limits, serving, steps
from benchmarks.gpu.clock import Budget, Stopwatch
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.play import ALL, Engine, Features
from benchmarks.gpu.report import GOALS, PREFILL_GOAL, STALLED_GOAL, WORTH_GOALS, markdown
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, SMALL, TINY, Shape, write
from bough.device.ops.triton.ops import TritonOps
from bough.device.platform.cuda import lost

Row = dict[str, Any]

ROWS = 256
CONTEXT = 1024


class Run:
    """One run: its budget, its folder, and what was found so far."""

    def __init__(self, device: Literal["cpu", "cuda"], tiny: bool, minutes: float, output: Path) -> None:
        self.device: Literal["cpu", "cuda"] = device
        self.tiny = tiny
        self.budget = Budget(60 * minutes)
        self.watch = Stopwatch(torch.device(device), 1 if tiny else 20)
        self.limits = Limits(1.0, 1.0)
        self._output = output
        name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu"
        self.result: dict[str, Any] = {
            "device": name, "torch": torch.__version__, "python": platform.python_version(), "tiny": tiny,
            "sections": {}, "left_out": [], "failed": [],
        }  # fmt: skip

    def section(self, name: str, rows: Generator[Row, None, None], seconds: float = 0.0) -> None:
        """Take ``rows`` until the budget has fewer than ``seconds`` left; an exception ends the section."""
        found = self.result["sections"].setdefault(name, [])
        while self.budget.left > seconds:
            try:
                row = next(rows, None)
            except Exception as error:
                self.failed(name, error)
                row = None
            if row is None:
                break
            found.append(row)
            print(f"[{self.budget.left:5.0f} s left] {name}: {json.dumps(row)}", flush=True)
            self.save()
        else:
            self.result["left_out"].append(f"{name}: after {len(found)} rows the time was over")
        rows.close()  # an engine gives its memory back
        self.save()

    def row(self, name: str, measure: Callable[[], Row], **more: Any) -> Iterator[Row]:
        """What ``measure`` finds; where it fails, that is written down, and there is no row."""
        try:
            found = measure()
        except Exception as error:
            self.failed(name, error)
            if lost(error):  # nothing that follows can succeed
                raise
        else:
            yield {"name": name, **found, **more}

    def failed(self, name: str, error: Exception) -> None:
        """Write down what ``name``, a section or a part of one, ended by."""
        self.result["failed"].append(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    def wrong(self) -> list[str]:
        """Checks that failed, rows with requests that did, and what ended by an exception."""
        rows = itertools.chain.from_iterable(self.result["sections"].values())
        bad = [str(row["name"]) for row in rows if not row.get("ok", True) or row.get("errors")]
        return bad + list(self.result["failed"])

    def save(self) -> None:
        """JSON, and the same as a table."""
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(self.result, indent=1) + "\n")
        self._output.with_suffix(".md").write_text(markdown(self.result))

    def engine(self, shape: Shape, folder: Path, **options: Any) -> Engine:
        context = 256 if self.tiny else 16384
        model = write(shape, folder / shape.name, context)
        return Engine(model, self.device, self.tiny, **options)


def correctness(run: Run, folder: Path) -> Generator[Row, None, None]:
    tests = ("tests/device/triton/test_sampling.py", "-k", "argmax") if run.tiny else checks.TESTS
    # Most of it is compiling, the first time. What is left is for the figures.
    seconds = 600 if run.tiny else 0.4 * run.budget.left
    yield checks.run_tests(tests, seconds, 1 if run.tiny else os.cpu_count() or 1)
    shape = TINY if run.tiny else SMALL
    sizes = {"rows": 8 if run.tiny else 64, "pool_tokens": 2048 if run.tiny else 65536}
    engines = []
    try:
        for graphs in (True, False):
            engines.append(run.engine(shape, folder, dtype="float32", graphs=graphs, **sizes))
        yield from checks.equivalence(engines[0], engines[1], shape.vocab_size, run.tiny)
    finally:
        for engine in engines:
            engine.close()


def single_kernels(run: Run) -> Generator[Row, None, None]:
    device = torch.device(run.device)
    dtype = torch.bfloat16 if run.device == "cuda" else torch.float32
    world = kernels.World(TritonOps(device, "measured"), device, dtype, run.tiny)
    with torch.inference_mode():
        for case in kernels.cases(world):
            try:
                row = kernels.measure(case, run.watch, run.limits)
            except Exception as error:
                run.failed(case.name, error)
                continue
            yield row


def model(run: Run, shape: Shape, folder: Path, **options: Any) -> Generator[Row, None, None]:
    """Decode, prefill and the serving workloads of one engine, features off in turn."""
    batches = (1, 3) if run.tiny else (1, 8, 64, ROWS)
    context, answer = (12, 3) if run.tiny else (CONTEXT, steps.ANSWER)
    rows = max(batches)
    # A folder of its own: the same shape may be built again with other options.
    pool_tokens = max(pool_of(run, rows), 0 if run.tiny else serving.most_cells(shape))
    engine = run.engine(shape, folder, rows=rows, pool_tokens=pool_tokens, **options)
    try:
        yield {"name": "start", "built_s": round(engine.built_seconds, 2)}
        decode = partial(steps.decode, engine, shape, run.limits, context=context, answer=answer)
        for batch in batches:
            goals = {"goal": GOALS.get((shape.name, batch), ""), "goal of overlap": STALLED_GOAL}
            yield from run.row(f"decode, {batch} rows from {context}", partial(decode, batch), **goals)
        for n in (20,) if run.tiny else (2048, 8192):
            measure = partial(steps.prefill, engine, shape, run.limits, n)
            yield from run.row(f"prefill, {n} tokens", measure, goal=PREFILL_GOAL)
        off = dict(steps.features())
        measure = partial(decode, batches[-1], features=off["no overlap"])
        yield from run.row(f"decode, {batches[-1]} rows, no overlap", measure)
        yield from serve(run, engine, shape, off)
    finally:
        engine.close()


def serve(run: Run, engine: Engine, shape: Shape, off: dict[str, Features]) -> Iterator[Row]:
    for name in serving.WORKLOADS:
        whole: Row = {}
        for row in run.row(name, partial(play, run, engine, shape, name)):
            whole = row
            yield row
        for without in serving.WORTH[name] if whole else ():
            measure = partial(play, run, engine, shape, name, off[without], whole)
            yield from run.row(f"{name}, {without}", measure, goal=WORTH_GOALS.get((name, without), ""))


def play(
    run: Run, engine: Engine, shape: Shape, name: str, features: Features = ALL, whole: Row | None = None
) -> Row:  # fmt: skip
    """The figures of a workload; ``whole`` are those of the same with everything on."""
    seed = list(serving.WORKLOADS).index(name)
    if whole is None:
        engine.play(serving.asks(name, shape.vocab_size, True, seed))  # compiles what is new
    figures = engine.play(serving.asks(name, shape.vocab_size, run.tiny, seed), features).figures()
    return figures if whole is None else serving.summary(figures, whole)


def changed(run: Run, shape: Shape, folder: Path, name: str, **options: Any) -> Iterator[Row]:
    """The same decode by an engine with other options, and the same requests that share nothing."""
    batches = (2,) if run.tiny else (1, 64)
    context, answer = (12, 3) if run.tiny else (CONTEXT, steps.ANSWER)
    rows = 3 if run.tiny else ROWS
    engine = run.engine(shape, folder, rows=rows, pool_tokens=pool_of(run, rows), **options)
    try:
        for batch in batches:
            measure = partial(steps.decode, engine, shape, run.limits, batch, context, answer=answer)
            yield from run.row(f"{name}: decode, {batch} rows from {context}", measure)
        engine.play(serving.asks("independent", shape.vocab_size, True, 0))
        known = run.result["sections"].get(shape.name, [])
        whole = next((row for row in known if row["name"] == "independent"), None)
        yield from run.row(f"{name}: independent", partial(play, run, engine, shape, "independent", ALL, whole))
    finally:
        engine.close()


def pool_of(run: Run, rows: int) -> int:
    """Cells for rows that decode from the context on."""
    return 2048 if run.tiny else rows * (CONTEXT + steps.ANSWER + 8)


def others(run: Run, shape: Shape, folder: Path) -> Generator[Row, None, None]:
    """Engines with one option changed; the share is of the roofline of bfloat16."""
    options: dict[str, dict[str, Any]] = {"no graphs": {"graphs": False}}
    if kernels.multiplies_fp8(torch.device(run.device)):
        options |= {"fp8 weights": {"quantize": "fp8"}, "fp8 KV": {"kv_dtype": "fp8"}}
    for name, how in options.items():
        try:
            yield from changed(run, shape, folder, name, **how)
        except Exception as error:
            run.failed(name, error)


def measure_limits(run: Run) -> Generator[Row, None, None]:
    run.limits = limits.measure(run.watch, run.tiny)
    run.result["limits"] = {"bandwidth": run.limits.bandwidth, "flops": run.limits.flops}
    yield {"copy_gb_per_s": round(run.limits.bandwidth / 1e9), "tflops": round(run.limits.flops / 1e12, 1)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes of nothing, to see that every part runs")
    parser.add_argument("--minutes", type=float, help="the run ends by then (default: 8.5, or 60 with --tiny)")
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="a .md is written beside it")
    parser.add_argument("--only", nargs="*", help="sections, instead of all")
    asked = parser.parse_args(arguments)
    if asked.device == "cpu":
        if not asked.tiny:
            parser.error("without a GPU the kernels are interpreted: only --tiny makes sense")
        importlib.import_module("tests.device.triton.interpreter").mend()
    minutes = (60.0 if asked.tiny else 8.5) if asked.minutes is None else asked.minutes
    run = Run(asked.device, asked.tiny, minutes, asked.output)
    first, second = (TINY, replace(TINY, name="tiny, tied", tied=True)) if asked.tiny else (LLAMA_8B, LLAMA_1B)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sections: dict[str, tuple[Callable[[], Generator[Row, None, None]], float]] = {
            "limits": (lambda: measure_limits(run), 0.0),
            "checks": (lambda: correctness(run, folder), 60.0),
            first.name: (lambda: model(run, first, folder), 20.0),
            "kernels": (lambda: single_kernels(run), 90.0),
            second.name: (lambda: model(run, second, folder), 15.0),
            "other options": (lambda: others(run, first, folder), 20.0),
        }
        if unknown := set(asked.only or ()) - sections.keys():
            parser.error(f"there is no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
        for title, (rows, seconds) in sections.items():
            if not asked.only or title in asked.only:
                run.section(title, rows(), 0.0 if asked.tiny else seconds)
    print(markdown(run.result))
    wrong = run.wrong()
    if wrong:
        print("not right: " + ", ".join(wrong), file=sys.stderr)
    return 1 if wrong else 0
