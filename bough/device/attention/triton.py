"""Attention by Triton kernels, planned on the host from what the plan of the step says: the device is never asked."""

from __future__ import annotations

import torch

from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.attention.room import Key, Room
from bough.device.attention.work import HostBatch, Sizes, plan_work
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Scoring
from bough.device.ops.registry import Ops
from bough.device.ops.triton.attention import attend, tiles_for
from bough.device.platform.copies import to_device

Tensor = torch.Tensor


class TritonAttention(PagedAttention):
    """:class:`bough.device.attention.base.AttentionBackend`; steps of decodes can be captured in graphs."""

    def __init__(self, ops: Ops) -> None:
        """``ops`` write the KV."""
        super().__init__(ops)
        self._room: Room | None = None
        self._works: dict[Key, tuple[Tensor, Sizes]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._room, self._works = None, {}

    def plan_in(self, room: Room, batch: AttentionBatch) -> None:
        """Plan a step whose work lies, or will lie, in ``room``: nothing is copied where it was planned before."""
        super().plan(batch)
        self._room = room

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        key = tiles_for(q, k_cache, v_cache), scoring.window, scoring.chunked
        work, sizes = self._work(key) if self._room is None else self._room.work(key)
        return attend(q, k_cache, v_cache, self.batch.locs(scoring.window)[0], work, sizes, scoring)

    def _work(self, key: Key) -> tuple[Tensor, Sizes]:
        if key not in self._works:
            batch = self.batch
            work = plan_work(batch.host or _from_device(batch), *key)
            self._works[key] = to_device(work.array, batch.rows.device), work.sizes
        return self._works[key]


def _from_device(batch: AttentionBatch) -> HostBatch:
    """What the device knows of a batch that was not made from a plan; waits for it."""
    return HostBatch(batch.rows.cpu().numpy(), batch.q_start.cpu().numpy(), batch.seq_len.cpu().numpy())
