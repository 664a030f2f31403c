"""One run: engines side by side, turn by turn in each row, medians of the repeats, floors of the same minutes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.peers import models
from benchmarks.peers.engines import KV_TOKENS, Contender, Engine, Settings
from benchmarks.peers.floors import WEIGHTS, Limits, floor, record, shape_of
from benchmarks.peers.home import Unavailable
from benchmarks.peers.limits import measure as measure_limits
from benchmarks.peers.limits import middle
from benchmarks.peers.process import Usage, await_usage, resident_bytes, usage
from benchmarks.peers.rows import BITS, GOAL_MACHINE, Row
from benchmarks.peers.running import Running, start
from bough.bench import machine
from bough.bench.measures import Figures, measure, medians
from bough.bench.workloads import valid

OVERHEAD_BYTES = 1 << 30
"""An engine's memory beside weights and KV, for planning which engines fit in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asks for.

    Attributes:
        rows: in table order.
        engines: the boughs first.
        repeats: measured runs of each cell.
        seed: other text with another seed.
        cell_seconds: a run that takes longer is given up, once and for all.
        behind: a contender so many times slower than the row's fastest is not run again.
        minutes: no row begins after so many.
        max_foreign: cores that others may use; beyond, a cell is run again.
        retries: how often.
        quiet_wait: seconds to wait for others to be quiet, before each cell.
    """

    rows: Sequence[Row]
    engines: Sequence[Engine]
    repeats: int
    seed: int
    cell_seconds: float
    behind: float
    minutes: float
    max_foreign: float
    retries: int
    quiet_wait: float


def is_quiet(figures: Figures, max_foreign: float) -> bool:
    """Whether others left the machine to the run."""
    return bool(figures["foreign_cores"] <= max_foreign)


class Cell:
    """What one contender did in one row."""

    def __init__(self, max_foreign: float) -> None:
        self.repeats: list[Figures] = []
        self.note: str | None = None
        self._max_foreign = max_foreign

    def result(self) -> dict[str, Any]:
        """JSON-ready: ``median`` of the repeats that others did not disturb, of all if there are none of these, and
        their ``spread``, (largest - smallest) / median of the seconds; ``disturbed`` is how many others did."""
        found: dict[str, Any] = {"repeats": self.repeats}
        quiet = [f for f in self.repeats if is_quiet(f, self._max_foreign)]
        counted = quiet or self.repeats
        seconds = [f["seconds"] for f in counted if "seconds" in f]
        if seconds:
            found["median"] = medians(counted)
            found["spread"] = round((max(seconds) - min(seconds)) / found["median"]["seconds"], 3)
        if disturbed := len(self.repeats) - len(quiet):
            found["disturbed"] = disturbed
        if self.note:
            found["note"] = self.note
        return found


class Field:
    """The contenders that run now, all on one model."""

    def __init__(self, settings: Settings, model: str, report: dict[str, Any]) -> None:
        self._settings = settings
        self._model = model
        self._report = report
        self.running: dict[Contender, Running] = {}

    def enter(self, contender: Contender) -> bool:
        """Start a contender; False, with the reason in the report, if it cannot be."""
        key = f"{self._model}/{contender.name}"
        log = self._settings.home.log("run-" + key.replace("/", "-").replace(" ", "-"))
        began = time.monotonic()
        try:
            self._report["versions"].setdefault(contender.engine.name, contender.engine.version(self._settings))
            running = self.running[contender] = start(contender, self._settings, self._model, log)
        except Unavailable as reason:
            self._report["skipped"][key] = str(reason)
            say(f"{key}: skipped: {reason}")
            return False
        seconds = round(time.monotonic() - began, 2)
        self._report["started"][key] = {"seconds": seconds, "bytes": resident_bytes(running.process.pid)}
        say(f"{key}: ready after {seconds} s")
        return True

    def revive(self, contender: Contender) -> bool:
        """Whether the contender runs, after it was started again if it had ended."""
        running = self.running.get(contender)
        if running is not None and running.process.popen.poll() is None:
            return True
        self.leave(contender)
        return self.enter(contender)

    def leave(self, contender: Contender) -> None:
        running = self.running.pop(contender, None)
        if running is not None:
            running.process.stop()

    def close(self) -> None:
        for contender in list(self.running):
            self.leave(contender)


def run(plan: Plan, settings: Settings, output: Path) -> dict[str, Any]:
    """Measure; the report is written to ``output`` after every row."""
    report: dict[str, Any] = {
        "benchmark": "peers",
        "machine": machine.facts(),
        "threads": settings.threads,
        "plan": {"repeats": plan.repeats, "seed": plan.seed, "cell_seconds": plan.cell_seconds, "behind": plan.behind},
        "versions": {},
        "started": {},
        "skipped": {},
        "rows": {},
    }
    for model in dict.fromkeys(row.model for row in plan.rows):
        if not (models.folder(settings.home, model) / "config.json").exists():
            raise Unavailable("there are no models yet: `python -m benchmarks.peers setup`")
    deadline = time.monotonic() + plan.minutes * 60
    for (model, _), group in groupby(plan.rows, lambda r: (r.model, r.bits)):
        rows = list(group)
        contenders = [Contender(e, f) for e in plan.engines for f in e.formats if competes(e, f, rows[0])]
        for block in blocks(contenders, settings, model, machine.memory().usable):
            field = Field(settings, model, report)
            try:
                entered = [c for c in block if field.enter(c)]
                for row in rows:
                    into = report["rows"].setdefault(row.name, {"sizes": row.sizes, "cells": {}, "wide": {}})
                    if time.monotonic() > deadline:
                        into["note"] = "not run: the time was over"
                        continue
                    cells, limits = run_row(row, entered, field, plan, settings.threads)
                    for contender, cell in cells.items():
                        into["cells" if row.takes(contender.format) else "wide"][contender.name] = cell.result()
                    into.setdefault("limits", []).extend(asdict(found) for found in limits)
                    add_floor(into, row, settings)
                    write(output, report)
            finally:
                field.close()
    return report


def competes(engine: Engine, weights: str, row: Row) -> bool:
    """Whether an engine with such weights has turns in a row: boughs also have them in bfloat16, to tell what fewer
    bits gain."""
    return row.takes(weights) or (weights == "bf16" and engine.name.startswith("bough"))


def blocks(
    contenders: Sequence[Contender], settings: Settings, model: str, available: int
) -> Iterator[list[Contender]]:
    """Split contenders, in order, into groups that fit in ``available`` bytes together."""
    shape = shape_of(models.folder(settings.home, model))
    parameters = shape.layer_parameters + shape.head_parameters
    block: list[Contender] = []
    used = 0
    for contender in contenders:
        # Engines may hold the stored weights and a packed copy.
        weights = parameters * BITS[contender.format] // 8 * 2
        needed = weights + KV_TOKENS * shape.kv_bytes + OVERHEAD_BYTES
        if block and used + needed > available:
            yield block
            block, used = [], 0
        block.append(contender)
        used += needed
    if block:
        yield block


def run_row(
    row: Row, contenders: Sequence[Contender], field: Field, plan: Plan, threads: int
) -> tuple[dict[Contender, Cell], list[Limits]]:
    """All repeats of all contenders, in turn: A B C, B C A, C A B. A contender that fails has no further turn.

    Who is first in its turn loses some hundredths, as the measurement of the limits has just given back its memory.

    With what the machine could do before, between and after the repeats.
    """
    cells = {c: Cell(plan.max_foreign) for c in contenders}
    for contender, cell in cells.items():
        if not field.revive(contender):
            cell.note = "could not be started again"
            continue
        _attempt(row, contender, field, plan, cell, None)
    limits = [measure_limits(threads)]
    for repeat in range(plan.repeats):
        for contender, cell in _turned(list(cells.items()), repeat):
            if cell.note is None and not (repeat and _hopeless(cell, cells.values(), plan)):
                _attempt(row, contender, field, plan, cell, repeat)
        limits.append(measure_limits(threads))
    return cells, limits


def _turned(contenders: list[tuple[Contender, Cell]], by: int) -> list[tuple[Contender, Cell]]:
    """``contenders``, of which another is first in each turn."""
    first = by % len(contenders) if contenders else 0
    return contenders[first:] + contenders[:first]


def _hopeless(cell: Cell, cells: Iterable[Cell], plan: Plan) -> bool:
    """Whether repeats would only tell more precisely how far behind the contender is."""
    first = [c.repeats[0]["seconds"] for c in cells if c.repeats and "seconds" in c.repeats[0]]
    own = cell.repeats[0]
    return is_quiet(own, plan.max_foreign) and own.get("seconds", 0.0) > plan.behind * min(first, default=0.0)


def _attempt(row: Row, contender: Contender, field: Field, plan: Plan, cell: Cell, repeat: int | None) -> None:
    """One turn; without ``repeat`` the small copy that goes first and is not measured."""
    try:
        if repeat is None:
            small = {name: min(value, row.sizes[name]) for name, value in row.workload.warm.items()}
            figures = _once(row, contender, field, plan, row.sizes | small, f"{plan.seed}/warm-up/{row.work}")
        else:
            figures = _cleanest(row, contender, field, plan, f"{plan.seed}/{row.work}/{repeat}")
            cell.repeats.append(figures[0])
            shown = " ".join(f"{k}={figures[0][k]:g}" for k in ("seconds", "foreign_cores") if k in figures[0])
            say(f"{row.name} #{repeat + 1} {contender.name}: {shown}")
        if figures[0]["errors"]:
            cell.note = figures[1]
    except TimeoutError:
        cell.note = f"did not finish in {plan.cell_seconds:.0f} s"
        field.leave(contender)
    except Unavailable as reason:
        cell.note = str(reason)
        field.leave(contender)
    if cell.note:
        say(f"{row.name} {contender.name}: {cell.note}")


def _cleanest(row: Row, contender: Contender, field: Field, plan: Plan, seed: str) -> tuple[Figures, str | None]:
    """Run until others kept quiet, each time with fresh text, or out of tries; the quietest run counts, or one with
    errors."""
    tries = []
    for attempt in range(plan.retries + 1):
        pid = field.running[contender].process.pid
        await_usage(pid, plan.quiet_wait, lambda now, before: now.foreign(before) <= plan.max_foreign)
        tries.append(_once(row, contender, field, plan, row.sizes, f"{seed}/{attempt}"))
        if tries[-1][0]["errors"]:
            return tries[-1]
        if is_quiet(tries[-1][0], plan.max_foreign):
            break
    return min(tries, key=lambda t: t[0]["foreign_cores"])


def _once(
    row: Row, contender: Contender, field: Field, plan: Plan, sizes: dict[str, float], seed: str
) -> tuple[Figures, str | None]:
    running = field.running[contender]
    before: Usage = usage(running.process.pid)
    calls = running.run(row.work, sizes, seed, plan.cell_seconds)
    after = usage(running.process.pid)
    figures = measure(calls)
    figures["foreign_cores"] = round(after.foreign(before), 3)
    figures["server_cpu_s"] = round(after.tree - before.tree, 2)
    figures["client_cpu_s"] = round(after.own - before.own, 2)
    if row.work == "json":
        figures["valid"] = round(sum(valid(call.texts.get(0, "")) for call in calls) / len(calls), 4)
    return figures, next((call.error for call in calls if call.error), None)


def add_floor(into: dict[str, Any], row: Row, settings: Settings) -> None:
    """Write the row's floor here, by the medians of its limits and by each of them, of others, and on the goal
    machine."""
    path = models.folder(settings.home, row.model)
    sizes = dict(row.sizes)
    if row.work == "json":
        sizes["out"] = _generated(into) or sizes["out"]
    asks = record(path, row.workload, sizes, "floor")
    of = (asks, int(sizes["concurrency"]), shape_of(path), WEIGHTS[row.bits])
    limits = [Limits(**found) for found in into["limits"]]
    into["floor_s"] = round(floor(*of, middle(limits)), 4)
    into["floors"] = [round(floor(*of, found), 4) for found in limits]
    # What others took on the goal machine is not to be set beside a rate that bough alone comes to here.
    others = middle(limits)
    into["others_floor_s"] = round(floor(*of, replace(others, bf16_gflop_s=others.others_gflop_s)), 4)
    into["goal_machine_floor_s"] = round(floor(*of, GOAL_MACHINE), 4)


def _generated(row: dict[str, Any]) -> float | None:
    """Tokens that an answer which may end early had on average, by the first contender that answered."""
    for cell in row["cells"].values():
        if "median" in cell:
            median: Figures = cell["median"]
            return round(median["generated_tokens"] / median["requests"])
    return None


def write(output: Path, report: dict[str, Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
