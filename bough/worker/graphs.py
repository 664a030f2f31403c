"""Steps of decodes captured once and replayed: the device's work without the host's launches.

A step in which every row computes one token is filled up with rows of nobody to one of a few sizes, for each of which
the whole forward was captured. What differs from step to step lies in buffers at fixed addresses. Rows that fill up
write to a cell that is nobody's and read it; nobody reads what they give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from bough.base.plan import NO_ADAPTER, StepPlan
from bough.device.attention.room import CapturedAttention, Room
from bough.device.attention.work import HostBatch
from bough.device.platform.copies import Timer, fill, to_device
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch, HostStep

Tensor = torch.Tensor

WARM_UP = 2
"""Runs before a capture: kernels are compiled, libraries choose theirs."""


class Capture(Protocol):
    """Captures work of the device; all captures of one object share their memory, so only one is in use at a time."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], None]:
        """Run ``run`` once; the function returned repeats its work, and leaves the result where it was then."""
        ...


class CudaCapture:
    """CUDA graphs in one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def buckets(most: int) -> list[int]:
    """Sizes up to ``most``, close enough for little waste and few enough to be captured at a start."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(320, most + 1, 64)]
    return sorted({min(size, most) for size in sizes} | {most})


@dataclass(slots=True)
class _Graph:
    """One size: its buffers, the batch that lies in them, and what a replay leaves."""

    whole: Tensor
    room: Room
    batch: ForwardBatch
    hidden: Tensor
    replay: Callable[[], None]


class DecodeGraphs:
    """The captured forwards of one model."""

    def __init__(
        self,
        capture: Capture,
        attention: CapturedAttention,
        compute: Callable[[ForwardBatch], Tensor],
        rows: DeviceRows,
        spare_locs: tuple[int, int],
        most: int,
        adapted: bool = False,
    ) -> None:
        """Captures, largest first, so that smaller ones find their memory there.

        Args:
            capture: how.
            attention: that of the model.
            compute: last hidden states of a batch that attention is planned for.
            rows: the tables; their last row is nobody's.
            spare_locs: a cell that is nobody's, and one of layers that see a window.
            most: rows of the largest step.
            adapted: steps of rows with adapters are captured, too, apart from the others.
        """
        self._capture, self._attention, self._compute, self._rows = capture, attention, compute, rows
        self._spare_locs = spare_locs
        self.sizes = buckets(most)
        kinds = (False, True) if adapted else (False,)
        self._graphs = {(size, kind): self._make(size, kind) for size in reversed(self.sizes) for kind in kinds}

    def forward(self, plan: StepPlan, timer: Timer) -> tuple[ForwardBatch, Tensor] | None:
        """The plan's batch and hidden states [B, D], valid until the next call; None for steps of other kinds.

        ``timer`` is started where the replay begins.
        """
        n = len(plan.rows)
        if len(plan.tokens) != n or n > self.sizes[-1]:
            return None
        size = self.sizes[np.searchsorted(self.sizes, n)]
        graph = self._graphs.get((size, bool((self._rows.adapter[plan.rows] != NO_ADAPTER).any())))
        if graph is None:
            return None
        step = self._padded(plan, size)
        fill(graph.whole, step.array)
        graph.room.fill(step.attention)
        timer.start()
        graph.replay()
        sampled = np.flatnonzero(plan.sample)
        at = graph.batch.attention.q_start[:n]
        batch = replace(
            graph.batch,
            sampled=sampled,
            sample_at=at,
            sample_rows=graph.batch.attention.rows[:n],
            host_q_start=step.attention.q_start[: n + 1],
        )
        if len(sampled) < n:
            chosen = to_device(sampled, graph.whole.device)
            batch.sample_at, batch.sample_rows = at[chosen], batch.sample_rows[chosen]
        return batch, graph.hidden[:n]

    def _make(self, size: int, adapted: bool) -> _Graph:
        device = self._rows.device
        none = np.zeros(0, np.int32)
        nobody = StepPlan(0, none, (), none, none, none, none, none, np.zeros(0, np.bool_))
        step = self._padded(nobody, size)
        whole = torch.zeros(len(step.array), dtype=torch.int32, device=device)
        room = Room(size, device)
        fill(whole, step.array)
        room.fill(step.attention)
        made: list[tuple[ForwardBatch, Tensor]] = []

        def run() -> Tensor:
            batch = ForwardBatch.of(step, whole, self._rows)
            if adapted:
                batch.places = whole[sum(step.lengths) :]
            self._attention.plan_in(room, batch.attention)
            hidden = self._compute(batch)
            made.append((batch, hidden))
            return hidden

        for _ in range(WARM_UP):
            run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        replay = self._capture(run)
        batch, hidden = made.pop()
        made.clear()
        return _Graph(whole, room, batch, hidden, replay)

    def _padded(self, plan: StepPlan, size: int) -> HostStep:
        """The step with rows of nobody behind its own; which rows sample is not among what is captured."""
        extra = size - len(plan.rows)

        def filled(values: Any, value: int) -> Any:
            return np.concatenate((values, np.full(extra, value, np.int32)))

        rows, start = filled(plan.rows, self._rows.n_rows), filled(plan.start, 0)
        q_start, seq_len = np.arange(size + 1, dtype=np.int32), start + 1
        out_loc, none = filled(plan.out_loc, self._spare_locs[0]), np.zeros(0, np.int32)
        parts = [rows, q_start, seq_len, start, out_loc, rows, filled(plan.tokens, 0), none, none]
        if self._rows.window_table is not None:
            parts.append(filled(none if plan.window_loc is None else plan.window_loc, self._spare_locs[1]))
        lengths = tuple(len(part) for part in parts)
        # Behind the parts of every step, the rows' adapters; nobody's row has none.
        array = np.concatenate((*parts, self._rows.adapter[rows])).astype(np.int32)
        return HostStep(array, lengths, HostBatch(rows, q_start, seq_len, plan.shared), np.zeros(0, np.intp))
