"""The KV cells of all layers."""

from __future__ import annotations

import ctypes

import torch

from bough.device.ops.cells import Cells, QuantizedCells
from bough.models.base import CacheSpec, KVShape

Tensor = torch.Tensor

HUGE_PAGE = 2 << 20
MADV_HUGEPAGE = 14


class KVPool:
    """Keys and values of every layer: cells [n_tokens, KH, D] as its spec says, indexed by loc.

    One more cell, ``spare_loc``, is nobody's: rows that fill up a batch write to it.

    The cells start uninitialised, so the system backs them with memory only when they are written; no cell is read
    before that.
    """

    def __init__(self, shape: KVShape, n_tokens: int, device: torch.device) -> None:
        self.shape = shape
        self.n_tokens = self.spare_loc = n_tokens

        def cells(layer: CacheSpec, dim: int) -> Cells:
            size = (n_tokens + 1, layer.n_heads, dim)
            data = torch.empty(size, dtype=shape.dtype, device=device)
            if device.type == "cpu":
                _advise_huge_pages(data)
            if shape.dtype != torch.int8 or not dim:
                return data
            return QuantizedCells(data, torch.empty(size[:2], dtype=torch.float32, device=device))

        self.k = [cells(layer, layer.key_dim) for layer in shape.layers]
        self.v = [cells(layer, layer.value_dim) for layer in shape.layers]


def _advise_huge_pages(tensor: Tensor) -> None:
    """Ask for large pages behind ``tensor``: cells of a fresh pool are first written in the middle of a step, and
    512 times fewer page faults then are a few percent of it. Advice only: a system that cannot, does not."""
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - start
    if length >= HUGE_PAGE:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(length // HUGE_PAGE * HUGE_PAGE), MADV_HUGEPAGE
        )
