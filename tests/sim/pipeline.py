"""The executor of the simulation: the fake device, with plans checked on their way in and failures on their way out."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bough.base.plan import Ints, Masks, StepPlan, StepResult
from bough.sim.clocked import Cost
from bough.sim.device import FailedAfterWrite, FakeDevice
from bough.sim.late import LateDevice, LateStep

from .adapters import FakeAdapters
from .oracle import CONTEXT, VOCAB, root_of
from .script import Arrive, Settings


class Violation(AssertionError):
    """An invariant does not hold; ``name`` says which."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name


def require(condition: object, name: str, text: str = "", *parts: object) -> None:
    """Raise a :class:`Violation` unless ``condition`` holds; ``text`` is formatted with ``parts`` only then."""
    if not condition:
        raise Violation(name, text.format(*parts))


class ForwardFailed(Exception):
    """The shared forward failed on purpose."""


@dataclass(slots=True)
class Step:
    """A plan in flight: an executor's forward and pending in one."""

    pipeline: Pipeline
    late: LateStep
    rids: list[str]
    digest: int
    behind: bool = False
    """It was launched behind one that failed."""

    def result(self) -> StepResult:
        return self.pipeline.deliver(self)


def digest(plan: StepPlan) -> int:
    """A checksum of everything in ``plan``."""
    crc = plan.step
    for array in (plan.released, plan.rows, plan.start, plan.n_new, plan.tokens, plan.out_loc, plan.sample):
        crc = zlib.crc32(array.tobytes(), crc)
    if plan.window_loc is not None:
        crc = zlib.crc32(plan.window_loc.tobytes(), crc)
    for prefix in plan.shared:
        crc = zlib.crc32(prefix.rows.tobytes(), crc + prefix.n_tokens)
    for init in plan.admitted:
        crc = zlib.crc32(init.prefix_locs.tobytes(), zlib.crc32(init.ids.tobytes(), crc + init.row))
    return crc


class Pipeline:
    """Executes plans in order, as late as the script says; their results wait until they are asked for.

    Args:
        arrivals: by seed, which every admitted row carries.
        rid_of: the request that owns a row now.
    """

    def __init__(self, settings: Settings, arrivals: dict[int, Arrive], rid_of: Callable[[int], str]) -> None:
        self._settings = settings
        self._arrivals = arrivals
        self._rid_of = rid_of
        self._on_row: dict[int, Arrive] = {}
        self._lengths: dict[int, int] = {}
        self._steps: list[Step] = []
        self._last_step = 0
        self.fault = ""
        """When the next forward fails: before it wrote its cells, or after."""
        device = FakeDevice(
            settings.n_cells,
            settings.max_running,
            CONTEXT,
            VOCAB,
            root=lambda init: root_of(init.seed, self.adapters.held.get(init.adapter, "").partition("@")[0]),
            fault=self._look,
            window=(settings.window, settings.window_cells, settings.chunked),
            cost=Cost(step=0.01, token=0.002, row=0.001),
        )
        self.late = LateDevice(device, settings.lag)
        self.adapters = FakeAdapters(1)
        self._adapted: dict[int, tuple[int, str]] = {}
        """By row: the place of its adapter, and what was there when it was admitted."""
        self.crc = 0
        """Checksum of all plans so far."""
        self.launches = 0
        self.failures: dict[str, int] = {}
        """By request: failed forwards that it took part in."""
        self.blamed: set[str] = set()
        """Requests that were alone in a forward that failed."""
        self.cached_len: dict[str, int] = {}
        """By request: tokens from the cache at its first admission."""
        self.admissions: dict[str, int] = {}
        self.planned_tokens = 0

    @property
    def tainted(self) -> bool:
        """A plan in flight failed: cells that were to be written are not."""
        return any(isinstance(step.late.launched.failed, Exception) for step in self._steps)

    def forward(self, plan: StepPlan) -> Step:
        self._inspect(plan)
        rids = [self._rid_of(row) for row in plan.rows.tolist()]
        for init in plan.admitted:
            rid = self._rid_of(init.row)
            # Forced tokens may come from the cache, too; they and a prompt's last token are not counted.
            self.cached_len.setdefault(rid, min(len(init.prefix_locs), init.n_prompt - 1))
            self.admissions[rid] = self.admissions.get(rid, 0) + 1
        step = Step(self, self.late.forward(plan), rids, digest(plan))
        self.launches += 1
        self.crc = zlib.crc32(step.digest.to_bytes(8, "little"), self.crc)
        self._steps.append(step)
        return step

    def sample(self, forward: Step, masks: Masks | None) -> Step:
        self.late.sample(forward.late, masks)
        return forward

    def shutdown(self) -> None:
        self._steps.clear()

    def poison(self, pages: Ints) -> None:
        """``pages`` were freed; whatever is launched from now on finds nothing in them."""
        size = self._settings.page_size
        self.late.poison((pages[:, None] * size + np.arange(size)).reshape(-1))

    def poison_window(self, pages: Ints) -> None:
        """The same for the cells of layers that see a window."""
        size = self._settings.page_size
        self.late.poison((pages[:, None] * size + np.arange(size)).reshape(-1), window=True)

    def deliver(self, step: Step) -> StepResult:
        require(step is self._steps[0], "order", "a result was asked for out of turn")
        require(digest(step.late.launched.plan) == step.digest, "plan", "a plan was changed after it was launched")
        self._steps.pop(0)
        if isinstance(step.late.launched.failed, Exception):
            self._blame(step)
        return step.late.result()

    def _blame(self, step: Step) -> None:
        """Bookkeeping of who may be ended for this failure. Everything in flight behind it is affected too."""
        if step.behind:
            return
        if len(step.rids) == 1:
            self.blamed.add(step.rids[0])
        affected = dict.fromkeys(step.rids)
        for later in self._steps:
            affected |= dict.fromkeys(later.rids)
            later.behind = True
        for rid in affected:
            self.failures[rid] = self.failures.get(rid, 0) + 1

    def _look(self, plan: StepPlan) -> dict[int, str]:
        """Which rows of ``plan`` fail; raises when all do."""
        failed: dict[int, str] = {}
        doomed, self.fault = self.fault, ""
        for i, (row, start, n) in enumerate(zip(plan.rows.tolist(), plan.start.tolist(), plan.n_new.tolist())):
            arrival = self._on_row[row]
            if start <= arrival.poison_at < start + n:
                doomed = doomed or "before"
            if arrival.fail_at == start + n and plan.sample[i]:
                failed[i] = "the logits are not finite"
        if doomed == "before":
            raise ForwardFailed
        if doomed == "after":
            raise FailedAfterWrite
        return failed

    def _inspect(self, plan: StepPlan) -> None:
        """What every device may rely on."""
        settings = self._settings
        rows = plan.rows.tolist()
        require(plan.step == self._last_step + 1, "plan", "steps are not numbered in order")
        self._last_step = plan.step
        n_tokens = int(plan.n_new.sum())
        self.planned_tokens += n_tokens
        require(0 < n_tokens <= settings.step_tokens, "budget", "{} tokens of {}", n_tokens, settings.step_tokens)
        require(len(rows) <= settings.max_running, "budget", "{} rows of {}", len(rows), settings.max_running)
        require(len(set(rows)) == len(rows), "plan", "a row is planned twice")
        require(len(plan.tokens) == len(plan.out_loc) == n_tokens, "plan", "the columns differ in length")
        require(min(plan.n_new) >= 1, "plan", "a row computes nothing")
        out = plan.out_loc.tolist()
        require(len(set(out)) == len(out), "plan", "two tokens go to one loc")
        require(0 <= min(out) and max(out) < settings.n_cells, "plan", "a loc is outside the pool")
        require((plan.window_loc is not None) == bool(settings.window), "plan", "cells of windows")
        if plan.window_loc is not None:
            seen = plan.window_loc.tolist()
            require(len(set(seen)) == len(out), "plan", "two tokens go to one loc of a window")
            require(
                0 <= min(seen) and max(seen) < settings.window_cells, "plan", "a loc of a window is outside the pool"
            )
        for row in plan.released.tolist():
            require(self._on_row.pop(row, None), "rows", "row {} is released and was not admitted", row)
            self._adapted.pop(row, None)
        for init in plan.admitted:
            require(init.row not in self._on_row, "rows", "row {} is admitted while it is taken", init.row)
            self._on_row[init.row] = self._arrivals[init.seed]
            self._lengths[init.row] = len(init.prefix_locs)
            name = self._arrivals[init.seed].request.namespace.adapter
            held = self.adapters.held.get(init.adapter, "")
            require(held.partition("@")[0] == name, "adapter", "row {} has {} and not {}", init.row, held, name)
            if name:
                self._adapted[init.row] = init.adapter, held
        for row, start, n in zip(rows, plan.start.tolist(), plan.n_new.tolist()):
            require(row in self._on_row, "rows", "row {} is planned and was not admitted", row)
            place, held = self._adapted.get(row, (-1, ""))
            require(self.adapters.held.get(place, "") == held, "adapter", "row {} has lost {}", row, held)
            require(start == self._lengths[row], "plan", "row {} has {} tokens, not {}", row, self._lengths[row], start)
            self._lengths[row] = start + n

    # -- for the checks

    def held_rows(self) -> set[int]:
        return set(self._on_row)
