"""The KV cells of all layers."""

from __future__ import annotations

import torch

from bough.models.base import KVShape

Tensor = torch.Tensor


class KVPool:
    """Keys and values, one tensor each per layer: [n_tokens, KH, D], indexed by loc.

    The cells start uninitialised, so the system backs them with memory only when they are written; no cell is read
    before that.

    Attributes:
        k, v: one tensor per layer.
    """

    def __init__(self, shape: KVShape, n_tokens: int, device: torch.device) -> None:
        self.n_tokens = n_tokens
        size = (n_tokens, shape.n_kv_heads, shape.head_dim)

        def cells() -> list[Tensor]:
            return [torch.empty(size, dtype=shape.dtype, device=device) for _ in range(shape.n_layers)]

        self.k, self.v = cells(), cells()
