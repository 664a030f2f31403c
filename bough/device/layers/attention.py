"""Multi-head attention with grouped keys and values over the paged KV."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.ops.cells import Cells

Tensor = torch.Tensor


class Attention:
    """Projections, rotation, KV write and attention of one layer.

    The KV of all T tokens is written before any of them attends, so that rows of one step may share cells.

    Attributes:
        qkv, out: the projections.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        heads: tuple[int, int, int],
        rotary: Tensor,
        bias: bool,
    ) -> None:
        """``heads`` is (query heads, key-value heads, head dimension); ``rotary`` the model's table."""
        n_heads, n_kv_heads, head_dim = heads
        qkv = [
            (f"{prefix}.q_proj", n_heads * head_dim),
            (f"{prefix}.k_proj", n_kv_heads * head_dim),
            (f"{prefix}.v_proj", n_kv_heads * head_dim),
        ]
        self.qkv = Linear(context, qkv, hidden_size, bias)
        self.out = Linear(context, [(f"{prefix}.o_proj", hidden_size)], n_heads * head_dim, bias)
        self._n_heads = n_heads
        self._width = n_heads * head_dim
        self._rotary = rotary
        self._scale = head_dim**-0.5
        self._backend = context.attention

    def __call__(self, x: Tensor, k_cache: Cells, v_cache: Cells) -> Tensor:
        """[T, hidden] -> [T, hidden]; the caches are this layer's [N, KH, D]."""
        q = self._backend.write(self.qkv(x), self._rotary, k_cache, v_cache, self._n_heads)
        return self.out(self._backend.forward(q, k_cache, v_cache, self._scale).view(-1, self._width))
