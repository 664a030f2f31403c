"""[row, position] -> loc, and the free rows."""

from __future__ import annotations

import numpy as np

from bough.base.plan import Ints


class PageTable:
    """The host's copy of the page table.

    Attributes:
        locs: [n_rows, max_len] int32. Zero pages of the operating system until written, so a large table
            costs memory only where rows have been. Entries beyond a row's length mean nothing.
    """

    def __init__(self, n_rows: int, max_len: int) -> None:
        if n_rows < 1 or max_len < 1:
            raise ValueError(f"a page table of {n_rows} rows and {max_len} positions is empty")
        self.n_rows = n_rows
        self.max_len = max_len
        self.locs: Ints = np.zeros((n_rows, max_len), dtype=np.int32)
        self.flat: Ints = self.locs.reshape(-1)
        self._free = list(range(n_rows - 1, -1, -1))
        self._taken = np.zeros(n_rows, dtype=np.bool_)

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    def take_row(self) -> int | None:
        """A free row (the lowest first, then the one given back last), or None."""
        if not self._free:
            return None
        row = self._free.pop()
        self._taken[row] = True
        return row

    def give_row(self, row: int) -> None:
        """Give ``row`` back; RuntimeError when it is not taken."""
        if not 0 <= row < self.n_rows or not self._taken[row]:
            raise RuntimeError(f"row {row} is not taken")
        self._taken[row] = False
        self._free.append(row)

    def is_taken(self, row: int) -> bool:
        return 0 <= row < self.n_rows and bool(self._taken[row])
