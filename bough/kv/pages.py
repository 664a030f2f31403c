"""The free list of KV pages."""

from __future__ import annotations

import numpy as np

from bough.base.plan import Ints


class PageAllocator:
    """Hands out page ids in ``[0, n_pages)``; the lowest first, then the one freed last.

    Every operation costs O(pages moved). A page freed twice, or one that was never handed out, raises
    RuntimeError before anything changes.
    """

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {n_pages}")
        self.n_pages = n_pages
        self._stack: Ints = np.arange(n_pages - 1, -1, -1, dtype=np.int32)
        self._free = self._least_free = n_pages
        self._taken = np.zeros(n_pages, dtype=np.bool_)
        self._scratch: Ints = np.zeros(n_pages, dtype=np.int32)

    @property
    def free(self) -> int:
        """Number of free pages."""
        return self._free

    @property
    def used(self) -> int:
        """Pages that were ever handed out; these are the lowest ones."""
        return self.n_pages - self._least_free

    def alloc(self, n: int) -> Ints | None:
        """[n] int32 page ids, or None (and no change) when fewer than ``n`` are free."""
        if n > self._free:
            return None
        pages = self._stack[self._free - n : self._free][::-1].copy()
        self._free -= n
        self._least_free = min(self._least_free, self._free)
        self._taken[pages.astype(np.intp)] = True
        return pages

    def free_pages(self, pages: Ints) -> None:
        """Take back ``pages``, int32 ids in any order."""
        n = len(pages)
        if not n:
            return
        if int(pages.min()) < 0 or int(pages.max()) >= self.n_pages or not self._taken[pages].all():
            raise RuntimeError("freed pages that are not handed out")
        # A page that occurs twice keeps only its last index, so reading the indices back shows it.
        index = np.arange(n, dtype=np.int32)
        self._scratch[pages] = index
        if not np.array_equal(self._scratch[pages], index):
            raise RuntimeError("freed the same page twice in one call")
        self._taken[pages] = False
        self._stack[self._free : self._free + n] = pages[::-1]
        self._free += n

    def taken(self) -> Ints:
        """Ids of all pages that are handed out, in rising order (O(n_pages), for checks)."""
        return np.flatnonzero(self._taken).astype(np.int32)

    def check(self) -> None:
        """Recompute the bitmap from the free list; AssertionError where they disagree."""
        expected = np.ones(self.n_pages, dtype=np.bool_)
        expected[self._stack[: self._free]] = False
        assert int(expected.sum()) == self.n_pages - self._free, "a page is twice in the free list"
        assert np.array_equal(expected, self._taken), "the bitmap disagrees with the free list"
