"""The KV cells of all layers."""

from __future__ import annotations

import torch

from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.pages import HUGE_PAGE, advise_huge_pages, populate
from bough.models.base import CacheSpec, KVShape

Tensor = torch.Tensor

AHEAD_BYTES = 384 << 20
"""Of cells that are made ready for the next burst while there is time."""

MOST_PIECES = 4
"""Of memory that one step waits for."""


class KVPool:
    """Keys and values of every layer: cells [n_tokens, KH, D] as its spec says, indexed by loc.

    Layers that see a window may have fewer cells, which have locs of their own. One more cell of every layer is
    nobody's: rows that fill up a batch write to it.

    The cells start uninitialised, so the system backs them with memory only when they are written; no cell is read
    before that. A step that is the first to write to them waits for it, and waits long, as all layers come to the end
    of their large pages at once: :meth:`prepare` has it done before, and :meth:`keep_up` where there is no time before.

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
        parts = [part for layer in (*self.k, *self.v) for part in _tensors(layer) if part.nbytes]
        self._unprepared = parts if device.type == "cpu" else []
        self._prepared = 0  # cells of every tensor
        self._at = 0  # the tensor that is prepared next
        self._piece = max(1, HUGE_PAGE * n_tokens // max((part.nbytes for part in parts), default=1))

    def prepare(self, used: int) -> bool:
        """Put memory behind one more piece, about 2 MiB of one tensor; False where that was done already for all cells
        up to ``AHEAD_BYTES`` beyond the ``used`` lowest ones."""
        if not self._unprepared:
            return False
        enough = self._prepared >= used + AHEAD_BYTES // self.shape.bytes_per_token
        return not enough and self._prepare_piece()

    def keep_up(self, used: int) -> None:
        """Where little is left of what was prepared, put memory behind as many cells as have come into use: a little
        between any two steps. With less than a piece of every tensor, a step could reach the end of those that are
        without."""
        for _ in range(MOST_PIECES if self._unprepared else 0):
            if self._ready - used >= self._piece or not self._prepare_piece():
                break

    @property
    def _ready(self) -> int:
        """Cells that there is memory for, or as many pieces."""
        return self._prepared + self._piece * self._at // len(self._unprepared)

    def _prepare_piece(self) -> bool:
        """Whether there was one left."""
        if self._prepared >= self.n_tokens:
            return False
        populate(self._unprepared[self._at][self._prepared : self._prepared + self._piece])
        self._at += 1
        if self._at == len(self._unprepared):
            self._at, self._prepared = 0, self._prepared + self._piece
        return True


def _tensors(cells: Cells) -> list[Tensor]:
    return [cells.data, cells.scale] if isinstance(cells, QuantizedCells) else [cells]
