"""Attention by Triton kernels, planned on the host from what the plan of the step says: the device is never asked."""

from __future__ import annotations

import torch

from bough.device.attention.base import AttentionBatch
from bough.device.attention.room import Key, Room
from bough.device.attention.work import HostBatch, Sizes, plan_work
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.registry import Ops
from bough.device.ops.triton.attention import attend, tiles_of
from bough.device.platform.copies import to_device

Tensor = torch.Tensor


class TritonAttention:
    """:class:`bough.device.attention.base.AttentionBackend`; steps of decodes can be captured in graphs."""

    name = "triton"

    def __init__(self, ops: Ops) -> None:
        """``ops`` write the KV."""
        self._ops = ops
        self._batch: AttentionBatch | None = None
        self._room: Room | None = None
        self._works: dict[Key, tuple[Tensor, Sizes]] = {}

    @property
    def batch(self) -> AttentionBatch:
        if self._batch is None:
            raise RuntimeError("forward before plan")
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._room, self._works = batch, None, {}

    def plan_in(self, room: Room, batch: AttentionBatch) -> None:
        """Plan a step whose work lies, or will lie, in ``room``: nothing is copied where it was planned before."""
        self._batch, self._room = batch, room

    def write(
        self, qkv: Tensor, cos_sin: Tensor, k_cache: Cells, v_cache: Cells, heads: Heads, window: int = 0
    ) -> Tensor:
        _, out_loc = self.batch.locs(window)
        return self._ops.rope_kv_write(qkv, cos_sin, self.batch.positions, out_loc, k_cache, v_cache, heads)

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        key = tiles_of(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype), scoring.window
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
