"""Attention of encoders: every token of a sequence attends to all of them, and nothing is kept for later."""

from __future__ import annotations

import torch

from bough.device.attention.base import AttentionBatch, Planned
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring

Tensor = torch.Tensor


class EncoderAttention(Planned):
    """An :class:`bough.device.attention.base.AttentionBackend` of steps that hold whole sequences; no KV pool."""

    name = "encoder"

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._ends: list[int] = batch.q_start[1:-1].tolist()

    def write(
        self, qkv: Tensor, cos_sin: Tensor, k_cache: Cells, v_cache: Cells, heads: Heads, window: int = 0
    ) -> Tensor:
        """The queries [T, H, D] of ``qkv`` [T, 3 * H * D]; its keys and values are kept until ``forward``."""
        parts = qkv.view(len(qkv), 3, heads.n_heads, heads.dim)
        self._k, self._v = parts[:, 1], parts[:, 2]
        return parts[:, 0]

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        """[T, H, D] attention within each sequence."""
        parts = [torch.tensor_split(x.transpose(0, 1), self._ends, dim=1) for x in (q, self._k, self._v)]
        attend = torch.nn.functional.scaled_dot_product_attention
        found = [
            attend(queries[None], keys[None], values[None], scale=scoring.scale)[0]
            for queries, keys, values in zip(*parts)
        ]
        return torch.cat(found, dim=1).transpose(0, 1)
