"""The one owner of the KV pool: pages, page table, prefix cache, and what waits for it.

A row's cells are ``[0, n_published)``, which belong to the cache and are locked by the row's handle, and the
private tail ``[n_published, n_cells)``. ``n_published`` is always whole pages, so every page has one owner:
the free list, one tree node, or one row's tail.

Pages are handed out again as soon as they are free. That is safe although a forward may still read or write
them, because the device executes plans in order and whoever gets them writes them in a later plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Index, Ints, SharedPrefix
from bough.kv.cache import NullPrefixCache, PrefixCache
from bough.kv.claims import Claims
from bough.kv.eviction import EVICTIONS
from bough.kv.node import NOBODY, CacheHandle, Match
from bough.kv.page_table import PageTable
from bough.kv.pages import PageAllocator
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree
from bough.kv.sharing import Sharing, find_sharing
from bough.kv.waiting import WaitingIndex
from bough.kv.window import WindowPages

CacheKind = Literal["radix", "none"]


class WindowSize(NamedTuple):
    """The layers that see a window: positions that their tokens see (:func:`bough.base.plan.first_seen`), and cells
    of their own pool."""

    window: int
    n_tokens: int
    chunked: bool = False


class Admission(NamedTuple):
    """A row, and how many of its first tokens are cached (their locs are in the page table)."""

    row: int
    cached_len: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the pool by owner, in whole pages: ``total == free + tree + private``.

    ``locked`` of the ``tree`` tokens are in use by rows, the rest can be evicted; ``rows`` are taken; ``evicted``
    counts the tokens evicted so far, flushes and discards not included. Of ``window`` tokens of the layers that see a
    window ``window_free`` are free and ``window_idle`` in no row's window, so that they can be had.
    """

    total: int
    free: int
    tree: int
    locked: int
    private: int
    rows: int
    evicted: int
    window: int = 0
    window_free: int = 0
    window_idle: int = 0


class KVManager:
    """Allocates, shares, evicts and frees KV cells for rows.

    Methods that take a row raise ValueError when it is not admitted.
    """

    def __init__(
        self,
        n_tokens: int,
        page_size: int,
        n_rows: int,
        max_len: int,
        eviction: str = "lru",
        cache: CacheKind = "radix",
        window: WindowSize | None = None,
    ) -> None:
        """A pool of ``n_tokens // page_size`` pages for at most ``n_rows`` rows of at most ``max_len`` tokens.

        ``window``: some layers see a window, and have a pool of their own. It has to hold a window, a step of new
        tokens and two pages more.

        Raises ConfigError for an unknown eviction policy, ValueError when a pool has no page.
        """
        self.page_size = page_size
        self.pages = PageAllocator(n_tokens // page_size)
        self.table = PageTable(n_rows, max_len)
        self.n_cells: Ints = np.zeros(n_rows, dtype=np.int32)
        self.n_published: Ints = np.zeros(n_rows, dtype=np.int32)
        self._handles: list[CacheHandle | None] = [None] * n_rows
        self._namespaces = [Namespace()] * n_rows
        self._evicted = 0
        self._window: WindowPages | None = None
        if window is not None:
            self._window = WindowPages(
                window.n_tokens, self.pages.n_pages, page_size, n_rows, window.window, window.chunked
            )
        self._sharing: Sharing | None = None
        self._cache: PrefixCache
        self._tree: RadixTree | None = None
        if cache == "radix":
            policy = EVICTIONS.get(eviction)()
            tree = self._tree = RadixTree(page_size, policy)
            self.waiting = WaitingIndex(tree, page_size)
            tree.observe(self.waiting)
            self._cache = tree
            aware = policy if isinstance(policy, ProgramEviction) else None
            self.claims = Claims(tree, aware, n_tokens)
        else:
            self.claims = Claims(None, None, n_tokens)
            self._cache = NullPrefixCache()
            self.waiting = WaitingIndex(self._cache, page_size)

    # -- what there is

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pages.n_pages * self.page_size

    @property
    def used(self) -> int:
        """Cells that have ever belonged to anybody; they are the lowest ones."""
        return self.pages.used * self.page_size

    @property
    def available(self) -> int:
        """Tokens that could be had now, in whole pages: free ones and those that can be evicted."""
        return self.pages.free * self.page_size + self._cache.total_tokens - self._cache.locked_tokens

    def usage(self) -> Usage:
        """Who holds how much, O(1)."""
        total, free, tree = self.capacity, self.pages.free * self.page_size, self._cache.total_tokens
        rows = self.table.n_rows - self.table.free
        owners = total, free, tree, self._cache.locked_tokens, total - free - tree, rows, self._evicted
        if self._window is None:
            return Usage(*owners)
        pages, size = self._window.pages, self.page_size
        return Usage(*owners, pages.n_pages * size, pages.free * size, self._window.idle)

    def windows_fit(self, limits: Ints, n_new: int) -> bool:
        """Whether rows of these final lengths can have their windows all at once, beside ``n_new`` tokens of a step."""
        if self._window is None:
            return True
        most = np.minimum(limits, self._window.window + 2 * self.page_size)
        return int(most.sum()) + n_new <= self._window.pages.n_pages * self.page_size

    def window_locs(self, locs: Ints) -> Ints | None:
        """The cells of the layers that see a window for tokens in ``locs``, negative where they are gone; None where
        all layers have the same cells."""
        return None if self._window is None else self._window.locs(locs)

    def match_len(self, ns: Namespace, ids: Ints, limit: int) -> int:
        """Tokens of ``ids`` (int32) that the cache holds, at most ``limit``, in whole pages. Changes nothing.

        Those that a row gets are fewer where layers that see a window have lost theirs.
        """
        return self._cache.match(ns, ids[: max(0, limit)]).length

    def row_locs(self, row: int, start: int, end: int) -> Ints:
        """[end - start] int32: a copy of the row's locs at positions ``[start, end)``."""
        self._handle(row)
        self._within(row, end)
        return self.table.locs[row, start:end].copy()

    def shared(self, rows: Index, start: Ints) -> tuple[SharedPrefix, ...]:
        """The groups among ``rows`` [B] that read the same cells first and write from ``start`` [B] on.

        O(B) between changes of the tree's handles, which cost O(rows).
        """
        if self._sharing is None:
            self._sharing = find_sharing(self._handles)
        return self._sharing.plan(rows, start)

    @property
    def keeps(self) -> bool:
        """Whether what rows leave is kept for later ones."""
        return self._tree is not None

    def spare(self, row: int, n: int, owner: int) -> int:
        """Up to how many of ``n`` more cells ``row`` can have at the cost of nothing that is worth more.

        That is free cells, and those of what the eviction policy would let go before anything new of the program
        ``owner``; they are free afterwards. Layers that see a window have to have theirs free.
        """
        size, start = self.page_size, int(self.n_cells[row])
        rest = -start % size
        missing = -(-max(0, n - rest) // size) - self.pages.free
        if missing > 0 and self._tree is not None:
            locs = self._tree.evict_lesser(missing * size, owner)
            self._evicted += len(locs)
            self._free_locs(locs)
        pages = self.pages.free
        if self._window is not None:
            pages = min(pages, self._window.pages.free)
        return min(n, rest + pages * size)

    # -- the life of a row

    def admit(self, ns: Namespace, ids: Ints, limit: int, owner: int = NOBODY) -> Admission | None:
        """Take a row and lock the cached prefix of ``ids`` (at most ``limit`` tokens) for the program ``owner``.

        None when no row is free.
        """
        row = self.table.take_row()
        if row is None:
            return None
        match = self._servable(self._cache.match(ns, ids[: max(0, min(limit, self.table.max_len))]), ids)
        handle = self._cache.lock(match, owner)
        self._handles[row] = handle
        self._sharing = None
        self._namespaces[row] = ns
        cached_len = handle.length
        self.table.locs[row, :cached_len] = handle.locs()
        self.n_cells[row] = self.n_published[row] = cached_len
        if self._window is not None:
            self._window.enter(row, self._pages_of(self.table.locs[row, :cached_len]))
        return Admission(row, cached_len)

    def grow(self, row: int, n: int) -> Ints | None:
        """Give ``row`` ``n`` more cells, evicting if needed: their locs [n], first the rest of its last page.

        None, and no change, when they cannot be had. ValueError beyond ``max_len``.
        """
        self._handle(row)
        start = int(self.n_cells[row])
        end = start + n
        if n < 0 or end > self.table.max_len:
            raise ValueError(f"row {row} cannot grow from {start} by {n} tokens; the most is {self.table.max_len}")
        size = self.page_size
        held = -(-start // size)
        if self._window is not None:
            self._window.pass_by(np.array([row], np.intp), self.n_cells[row : row + 1], self.table)
        pages = self._alloc(-(-end // size) - held)
        if pages is None:
            return None
        locs: Ints = self.table.locs[row]
        fresh = (pages[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        rest = min(held * size, end) - start
        if rest:
            locs[start : start + rest] = np.arange(1, rest + 1, dtype=np.int32) + locs[start - 1]
        locs[start + rest : end] = fresh[: n - rest]
        self.n_cells[row] = end
        return self.row_locs(row, start, end)

    def grow_rows(self, rows: Index) -> Ints | None:
        """One more cell for each of the admitted, distinct ``rows`` ([B]): their locs [B].

        None, and no change for any row, when they cannot be had. ValueError beyond ``max_len``.
        """
        if not len(rows):
            return np.zeros(0, dtype=np.int32)
        position = self.n_cells[rows]
        if max(position.tolist()) >= self.table.max_len:
            raise ValueError(f"a row cannot grow beyond {self.table.max_len} tokens")
        if self._window is not None:
            self._window.pass_by(rows, position, self.table)
        index = rows * self.table.max_len + position
        if self.page_size == 1:
            locs = self._alloc(len(rows))
            if locs is None:
                return None
        else:
            opens = position % self.page_size == 0
            fresh = self._alloc(int(np.count_nonzero(opens)))
            if fresh is None:
                return None
            # A row that opens a page has no cell before it to count from; index - 1 is not used then.
            locs = self.table.flat[np.maximum(index - 1, 0)]
            locs += 1
            locs[opens] = fresh * np.int32(self.page_size)
        self.table.flat[index] = locs
        self.n_cells[rows] = position + 1
        return locs

    def publish(self, row: int, ids: Ints, upto: int) -> int:
        """Share the row's first ``upto`` tokens (whole pages of them) now; how many it has published then.

        ``ids`` (int32) is the whole sequence of the row, at least ``upto`` long. The KV may still be unwritten:
        whoever matches it is planned later and so reads after the write.

        Where the tree already goes on with the row's next page, because somebody else published the same
        tokens meanwhile, nothing is published: the device knows the row's own cells and learns of other ones
        only when a row is admitted, so they stay private until :meth:`release` merges them. A later call tries
        again, and succeeds once the other copy has been evicted.
        """
        handle = self._handle(row)
        start, end = int(self.n_published[row]), upto - upto % self.page_size
        self._within(row, upto)
        if end > start and not handle.follows(ids[start : start + self.page_size]):
            self._cache.insert(handle, ids[start:end], self.table.locs[row, start:end])
            self.n_published[row] = handle.length
            self._sharing = None
        return int(self.n_published[row])

    def truncate(self, row: int, length: int) -> None:
        """Drop the row's cells beyond ``length``.

        ValueError for published cells, for more than it has, and where layers that see a window have let go of what a
        token at ``length`` sees.
        """
        self._handle(row)
        self._within(row, length)
        if length < self.n_published[row]:
            raise ValueError(f"row {row} has published {self.n_published[row]} tokens, more than {length}")
        if self._window is not None and not self._window.sees(row, length):
            raise ValueError(f"row {row} has let go of what a token at {length} sees")
        start, end = -(-length // self.page_size) * self.page_size, int(self.n_cells[row])
        if self._window is not None and end > start:
            self._window.give_back(self._pages_of(self.table.locs[row, start:end]))
        self._free(row, start, end)
        self.n_cells[row] = length

    def release(self, row: int, ids: Ints, upto: int | None, *, spent: bool = False) -> None:
        """The row leaves: it is finished, aborted or retracted. ``spent``: nobody will begin with what it leaves.

        The whole pages among its first ``upto`` tokens, whose KV is (or by plans already launched will be)
        written, go into the cache and can be evicted; the rest is freed. None publishes nothing more.
        """
        handle = self._handle(row)
        start, end = int(self.n_published[row]), int(self.n_cells[row])
        self._within(row, upto or 0)
        whole = max(start, (upto or 0) // self.page_size * self.page_size)
        if self._window is not None:
            self._window.leave(row, end, self.table)
        if whole > start:
            known = start + self._merge(row, handle, ids[:whole], start)
            self._hand_over(row, ids, start, known)
            self._free(row, start, known)
        self._free(row, whole, end)
        if spent:
            self.claims.spend(handle)
        self._cache.unlock(handle)
        self._leave(row)

    def _merge(self, row: int, handle: CacheHandle, ids: Ints, start: int) -> int:
        """Insert ``ids[start:]``; how many of these cells stay the row's because the cache has the tokens."""
        if handle.follows(ids[start : start + self.page_size]):
            # An insert would split the node in which the tokens end, only for a handle that ends right after.
            known = self._cache.match(self._namespaces[row], ids).length
            if known == len(ids):
                return known - start
        return self._cache.insert(handle, ids[start:], self.table.locs[row, start : len(ids)])

    def discard(self, row: int, valid: int) -> None:
        """The row leaves because its forward failed; only its first ``valid`` tokens are written.

        What it published beyond that leaves the cache together with all that hangs below; the rest stays as
        evictable. Rows that read unwritten cells of this one have to leave before it: they were admitted later,
        so discarding the youngest first does it. RuntimeError when one of them is still there.
        """
        handle = self._handle(row)
        if self._window is not None:
            self._window.leave(row, int(self.n_cells[row]), self.table)
        self._free(row, int(self.n_published[row]), int(self.n_cells[row]))
        self._leave(row)
        self._free_locs(self._cache.discard(handle, valid))

    def flush(self) -> int:
        """Drop everything from the cache that no row uses; how many tokens."""
        locs = self._cache.evict(self._cache.total_tokens - self._cache.locked_tokens)
        self._free_locs(locs)
        return len(locs)

    # -- inside

    def _handle(self, row: int) -> CacheHandle:
        handle = self._handles[row] if self.table.is_taken(row) else None
        if handle is None:
            raise ValueError(f"row {row} is not admitted")
        return handle

    def _within(self, row: int, length: int) -> None:
        if not 0 <= length <= self.n_cells[row]:
            raise ValueError(f"row {row} has {self.n_cells[row]} cells, not {length}")

    def _leave(self, row: int) -> None:
        self._handles[row] = None
        self._sharing = None
        self.n_cells[row] = self.n_published[row] = 0
        self.table.give_row(row)

    def _servable(self, match: Match, ids: Ints) -> Match:
        """``match``, a part of ``ids``, as far as all layers can serve it."""
        if self._window is None or not match.length:
            return match
        served = self._window.servable(self._pages_of(match.locs()))
        return match if served == match.length else self._cache.match(match.ns, ids[:served])

    def _hand_over(self, row: int, ids: Ints, start: int, known: int) -> None:
        """The row's cells ``[start, known)`` are about to be freed, because the cache has others of these tokens. Where
        those are gone from the layers that see a window, the row's are what is left."""
        if self._window is not None and known > start:
            kept = self._cache.match(self._namespaces[row], ids[:known]).locs()[start:]
            if len(kept):  # a cache that keeps nothing has no others
                self._window.hand_over(self._pages_of(self.table.locs[row, start:known]), self._pages_of(kept))

    def _alloc(self, n: int) -> Ints | None:
        """Fresh pages, which are in the window of whoever asks; None, and no change, when there are too few."""
        if self._window is not None and n * self.page_size > self._window.available:
            return None
        short = n - self.pages.free
        if short > 0:
            if n * self.page_size > self.available:
                return None
            locs = self._cache.evict(short * self.page_size)
            self._evicted += len(locs)
            self._free_locs(locs)
        pages = self.pages.alloc(n)
        if self._window is not None and pages is not None:
            self._window.take(pages)
        return pages

    def _free(self, row: int, start: int, end: int) -> None:
        """Free the pages of the row's cells ``[start, end)``; ``start`` is the first cell of a page."""
        if end > start:
            self._free_locs(self.table.locs[row, start:end])

    def _free_locs(self, locs: Ints) -> None:
        """Free the pages that ``locs`` cover; they begin with the first cell of a page, page after page."""
        pages = self._pages_of(locs)
        if self._window is not None:
            self._window.forget(pages)
        self.pages.free_pages(pages)

    def _pages_of(self, locs: Ints) -> Ints:
        pages: Ints = locs[:: self.page_size] // np.int32(self.page_size)
        return pages

    def check(self) -> None:
        """Every page has one owner, and every row's path is in the page table; AssertionError otherwise.

        O(pool), for tests and idle times. The tree and the allocator check themselves first.
        """
        self.pages.check()
        size = self.page_size
        held = self._cache.check()
        owned = [held[::size] // size]
        assert np.array_equal(held, (owned[0][:, None] * size + np.arange(size)).reshape(-1)), "a page is torn"
        for row, handle in enumerate(self._handles):
            assert (handle is not None) == self.table.is_taken(row), "a row has no handle, or a handle no row"
            if handle is None:
                assert not self.n_cells[row] and not self.n_published[row], "a free row has cells"
                continue
            start, end = int(self.n_published[row]), int(self.n_cells[row])
            assert handle.length == start <= end, "the handle is not where the published tokens end"
            locs = self.table.locs[row, :end]
            assert np.array_equal(locs[:start], handle.locs()), "the page table disagrees with the tree"
            tail = locs[start::size] // size
            spread = (tail[:, None] * size + np.arange(size)).reshape(-1)
            assert np.array_equal(locs[start:], spread[: end - start]), "a private page is torn"
            owned.append(tail)
        pages = np.sort(np.concatenate(owned))
        assert np.array_equal(pages, self.pages.taken()), "a page has no owner, or two"
        if self._window is not None:
            self._window.check(self.table, self.n_cells)
