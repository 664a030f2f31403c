"""Cells of the layers that see a window: a pool of their own, of which a row keeps what its next tokens can see.

A page of the pool may have a twin here, which holds the same tokens' KV of the layers with a window. A row uses the
twins of the pages that lie in its window; what it has left behind stays as long as nobody needs the memory, the one
left longest goes first, so that the ends of sequences, where they are taken up again, outlive their beginnings. The
tree knows nothing of it: a page whose twin is gone still serves the other layers, and a prefix is taken from the cache
as far as the twins of its last window are there.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from bough.base.plan import Index, Ints, first_seen
from bough.kv.page_table import PageTable
from bough.kv.pages import PageAllocator


class WindowPages:
    """The twins of pages. All methods take ids of pages of the whole pool; a twin lives until its page is freed.

    Attributes:
        window: positions that a token sees, its own included; with ``chunked`` those from the last multiple of it on.
        pages: what the twins are taken from.
    """

    def __init__(
        self, n_tokens: int, n_pages: int, page_size: int, n_rows: int, window: int, chunked: bool = False
    ) -> None:
        """``n_tokens`` cells for twins of ``n_pages`` pages and rows up to ``n_rows``."""
        self.window, self.chunked = window, chunked
        self.pages = PageAllocator(n_tokens // page_size)
        self._size = page_size
        self._twin: Ints = np.full(n_pages, -1, np.int32)
        self._users: Ints = np.zeros(n_pages, np.int32)
        self._left = np.zeros(n_pages, np.int64)
        """When the last user left the page; counts from 1."""
        self._queue: deque[tuple[int, Ints]] = deque()
        """Pages by when they were left; those that were used or lost since are skipped."""
        self._queued = 0
        self._now = 0
        self._idle = 0
        self._begin: Ints = np.zeros(n_rows, np.int32)
        """[n_rows] the first page, as a position in the row, that each row uses; it uses all from there on."""

    @property
    def available(self) -> int:
        """Tokens for which there could be twins now, in whole pages."""
        return (self.pages.free + self._idle) * self._size

    @property
    def idle(self) -> int:
        """Tokens with twins that no row uses."""
        return self._idle * self._size

    def locs(self, locs: Ints) -> Ints:
        """The cells here of tokens whose cells are ``locs``; negative where there is no twin."""
        size = np.int32(self._size)
        found: Ints = self._twin[locs // size] * size + locs % size
        return found

    def servable(self, pages: Ints) -> int:
        """How many tokens of a cached sequence of these pages a row can take: whole pages.

        What the token that follows sees has to have twins.
        """
        lost = np.flatnonzero(self._twin[pages] < 0)
        if not len(lost):
            return len(pages) * self._size
        # Behind each page that has lost its twin, up to the next one that has.
        ends = np.append(lost[1:], len(pages))
        enough = ends[first_seen(ends * self._size, self.window, self.chunked) >= (lost + 1) * self._size]
        if len(enough):
            return int(enough[-1]) * self._size
        return int(lost[0]) * self._size

    # -- what rows use

    def enter(self, row: int, pages: Ints) -> None:
        """``row`` begins behind the cached ``pages``."""
        self._begin[row] = first = self._first_page(len(pages) * self._size)
        used = pages[first:]
        self._idle -= int(np.count_nonzero(self._users[used] == 0))
        self._users[used] += 1

    def take(self, pages: Ints) -> None:
        """Give twins to ``pages``, which are fresh and get one user each; RuntimeError if there are not enough."""
        self._evict(len(pages) - self.pages.free)
        twins = self.pages.alloc(len(pages))
        if twins is None:
            raise RuntimeError("there are fewer cells of the layers that see a window than were asked for")
        self._twin[pages] = twins
        self._users[pages] = 1

    def pass_by(self, rows: Index, positions: Ints, table: PageTable) -> None:
        """The next tokens of ``rows`` [B] are at ``positions`` [B]: they let go of what these cannot see."""
        first = np.maximum(0, first_seen(positions, self.window, self.chunked)) // self._size
        behind = first > self._begin[rows]
        if behind.any():
            rows, first = rows[behind], first[behind]
            begin = self._begin[rows]
            self._begin[rows] = first
            self._drop(_pages(rows, begin, first, table, self._size))

    def sees(self, row: int, position: int) -> bool:
        """Whether ``row`` still uses all that a token at ``position`` sees."""
        return self._first_page(position) >= int(self._begin[row])

    def _first_page(self, position: int) -> int:
        """That of the first token that one at ``position`` sees."""
        return max(0, first_seen(position, self.window, self.chunked)) // self._size

    def leave(self, row: int, end: int, table: PageTable) -> None:
        """``row``, whose cells end at ``end``, uses nothing any more."""
        begin, self._begin[row] = int(self._begin[row]), 0
        self._drop(table.locs[row, begin * self._size : end : self._size] // np.int32(self._size))

    def give_back(self, pages: Ints) -> None:
        """A row no longer uses ``pages``, the last ones that it had."""
        self._drop(pages)

    def _drop(self, pages: Ints) -> None:
        np.subtract.at(self._users, pages, 1)
        left = np.unique(pages)
        left = left[self._users[left] == 0]
        self._idle += len(left)
        self._line_up(left)

    def _line_up(self, pages: Ints) -> None:
        """Nobody uses ``pages`` from now on."""
        if not len(pages):
            return
        self._now += 1
        self._left[pages] = self._now
        self._queue.append((self._now, pages))
        self._queued += len(pages)
        if self._queued > 2 * self.pages.n_pages + 64:
            # Most are skipped: sweep those, at O(1) for each that was lined up.
            self._queue = deque((when, idle) for when, pages in self._queue if len(idle := self._still(when, pages)))
            self._queued = sum(len(pages) for _, pages in self._queue)

    def _still(self, when: int, pages: Ints) -> Ints:
        """Those of ``pages`` that have twins and were not used since ``when``."""
        idle: Ints = pages[(self._left[pages] == when) & (self._users[pages] == 0) & (self._twin[pages] >= 0)]
        return idle

    def _evict(self, n: int) -> None:
        while n > 0 and self._queue:
            when, pages = self._queue.popleft()
            self._queued -= len(pages)
            idle = self._still(when, pages)
            if len(idle) > n:
                self._queue.appendleft((when, idle[n:]))
                self._queued += len(idle) - n
                idle = idle[:n]
            self._free(idle)
            n -= len(idle)

    def _free(self, pages: Ints) -> None:
        self.pages.free_pages(self._twin[pages])
        self._twin[pages] = -1
        self._idle -= len(pages)

    # -- what becomes of pages

    def forget(self, pages: Ints) -> None:
        """``pages``, which no row uses, are freed: their twins, too."""
        held = pages[self._twin[pages] >= 0]
        assert not self._users[held].any(), "a page is freed whose twin is used"
        if len(held):
            self._free(held)

    def hand_over(self, own: Ints, kept: Ints) -> None:
        """Twins of ``own``, about to be freed, go to ``kept``, pages of the same tokens, where these have none."""
        moved = (self._twin[own] >= 0) & (self._twin[kept] < 0)
        own, kept = own[moved], kept[moved]
        if len(own):
            self._twin[kept] = self._twin[own]
            self._twin[own] = -1
            self._line_up(kept)

    def check(self, table: PageTable, n_cells: Ints) -> None:
        """Recount from the ``n_cells`` [n_rows] of every row; AssertionError where something disagrees."""
        self.pages.check()
        users = np.zeros_like(self._users)
        for row, end in enumerate(n_cells.tolist()):
            begin = int(self._begin[row]) * self._size
            users[table.locs[row, begin : end : self._size] // np.int32(self._size)] += 1
        assert np.array_equal(self._users, users), "the users of a window are miscounted"
        held = np.flatnonzero(self._twin >= 0)
        assert np.array_equal(np.sort(self._twin[held]), self.pages.taken()), "a twin has no page, or two"
        assert (self._twin[users > 0] >= 0).all(), "a page in a window has no twin"
        idle = held[users[held] == 0].tolist()
        assert self._idle == len(idle), "idle twins are miscounted"
        queued = [page for when, pages in self._queue for page in self._still(when, pages).tolist()]
        assert sorted(queued) == idle, "not exactly the idle twins can be evicted"


def _pages(rows: Index, begin: Ints, end: Ints, table: PageTable, size: int) -> Ints:
    """The pages ``[begin, end)``, as positions in ``rows`` [B], of all of them."""
    count = end - begin
    of = np.repeat(np.arange(len(rows)), count)
    at = begin[of] + np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    pages: Ints = table.flat[rows[of] * table.max_len + at * size] // np.int32(size)
    return pages
