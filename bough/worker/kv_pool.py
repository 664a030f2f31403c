"""The KV cells of all layers."""

from __future__ import annotations

import torch

from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.pages import advise_huge_pages
from bough.models.base import CacheSpec, KVShape

Tensor = torch.Tensor


class KVPool:
    """Keys and values of every layer: cells [n_tokens, KH, D] as its spec says, indexed by loc.

    Layers that see a window may have fewer cells, which have locs of their own. One more cell of every layer is
    nobody's: rows that fill up a batch write to it.

    The cells start uninitialised, so the system backs them with memory only when they are written; no cell is read
    before that.

    Attributes:
        spare_loc, spare_window_loc: the cell that is nobody's, and that of layers that see a window.
    """

    def __init__(self, shape: KVShape, n_tokens: int, device: torch.device, window_tokens: int | None = None) -> None:
        """``window_tokens``: cells of layers that see a window; None: as many as all have."""
        self.shape = shape
        self.n_tokens = self.spare_loc = n_tokens
        self.spare_window_loc = n_tokens if window_tokens is None else window_tokens

        def cells(layer: CacheSpec, dim: int) -> Cells:
            n = self.spare_window_loc if layer.window else n_tokens
            size = (n + 1, layer.n_heads, dim)
            data = torch.empty(size, dtype=shape.dtype, device=device)
            if device.type == "cpu":
                # Cells of a fresh pool are first written in the middle of a step: 512 times fewer page faults.
                advise_huge_pages(data)
            if shape.dtype != torch.int8 or not dim:
                return data
            return QuantizedCells(data, torch.empty(size[:2], dtype=torch.float32, device=device))

        self.k = [cells(layer, layer.key_dim) for layer in shape.layers]
        self.v = [cells(layer, layer.value_dim) for layer in shape.layers]
