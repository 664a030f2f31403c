"""Attention of encoders: every token of a sequence attends to all of them, and nothing is kept for later."""

from __future__ import annotations

import torch

from bough.device.attention.base import AttentionBatch

Tensor = torch.Tensor


class EncoderAttention:
    """An :class:`bough.device.attention.base.AttentionBackend` of steps that hold whole sequences; no KV pool.

    Attributes:
        positions: [T] position of each token of the planned step.
    """

    name = "encoder"

    def plan(self, batch: AttentionBatch) -> None:
        self.positions = batch.positions
        self._lengths: list[int] = torch.diff(batch.q_start).tolist()

    def write(self, qkv: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, n_heads: int) -> Tensor:
        """The queries [T, H, D] of ``qkv`` [T, 3 * H * D]; its keys and values are kept until ``forward``."""
        q, self._k, self._v = qkv.unflatten(1, (3, n_heads, -1)).unbind(1)
        return q

    def forward(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
        """[T, H, D] attention within each sequence."""
        parts = zip(*(x.split(self._lengths) for x in (q, self._k, self._v)))
        attend = torch.nn.functional.scaled_dot_product_attention
        found = [attend(*(x.transpose(0, 1)[None] for x in part), scale=scale)[0] for part in parts]
        return torch.cat([x.transpose(0, 1) for x in found])
