"""Attention through the registered ops: the backend "reference" or "cpu", after the ops it was given."""

from __future__ import annotations

import torch

from bough.device.attention.base import Planned
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.registry import Ops

Tensor = torch.Tensor


class PagedAttention(Planned):
    """:class:`bough.device.attention.base.AttentionBackend` for ops that read the page table themselves."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.name = ops.name
        self._ops = ops

    def write(
        self, qkv: Tensor, cos_sin: Tensor, k_cache: Cells, v_cache: Cells, heads: Heads, window: int = 0
    ) -> Tensor:
        _, out_loc = self.batch.locs(window)
        return self._ops.rope_kv_write(qkv, cos_sin, self.batch.positions, out_loc, k_cache, v_cache, heads)

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        batch = self.batch
        page_table, _ = batch.locs(scoring.window)
        return self._ops.paged_attention(
            q, k_cache, v_cache, page_table, batch.rows, batch.q_start, batch.seq_len, scoring, batch.groups
        )
