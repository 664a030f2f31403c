"""What the manager asks of a prefix cache, and the cache that keeps nothing."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.kv.node import NOBODY, CacheHandle, Match, Node

NOTHING: Ints = np.zeros(0, dtype=np.int32)


class PrefixCache(Protocol):
    """Shared KV by (namespace, tokens). Lengths are multiples of the page size.

    ``total_tokens`` are held; of these ``locked_tokens`` are under a live handle and the rest can be evicted.
    """

    total_tokens: int
    locked_tokens: int

    def match(self, ns: Namespace, ids: Ints) -> Match:
        """The longest cached prefix of ``ids``. Changes nothing."""
        ...

    def lock(self, match: Match, owner: int = NOBODY) -> CacheHandle:
        """Keep what ``match`` found for ``owner`` until the handle is unlocked."""
        ...

    def unlock(self, handle: CacheHandle) -> None:
        """End ``handle``."""
        ...

    def insert(self, handle: CacheHandle, ids: Ints, locs: Ints) -> int:
        """Take ``locs``, the KV of the tokens ``ids`` that follow ``handle``, and move the handle to their end.

        Returns d: the first d of ``locs`` remain the caller's, the others now belong to the cache.
        """
        ...

    def evict(self, n_tokens: int) -> Ints:
        """Drop at least ``n_tokens`` unlocked tokens, or all there are; whole pages. Their locs."""
        ...

    def discard(self, handle: CacheHandle, length: int) -> Ints:
        """End ``handle`` and forget all that follows the first ``length`` tokens of its path. The locs."""
        ...

    def check(self) -> Ints:
        """Recompute everything; AssertionError where an invariant fails. The locs held, in no special order."""
        ...


class NullPrefixCache:
    """Shares nothing and keeps nothing."""

    def __init__(self) -> None:
        self.total_tokens = 0
        self.locked_tokens = 0

    def match(self, ns: Namespace, ids: Ints) -> Match:
        return Match(0, None, ns, 0)

    def lock(self, match: Match, owner: int = NOBODY) -> CacheHandle:
        return CacheHandle(Node(match.ns, None, 0, b"", b"", 0), owner)

    def unlock(self, handle: CacheHandle) -> None:
        pass

    def insert(self, handle: CacheHandle, ids: Ints, locs: Ints) -> int:
        return len(locs)

    def evict(self, n_tokens: int) -> Ints:
        return NOTHING

    def discard(self, handle: CacheHandle, length: int) -> Ints:
        return NOTHING

    def check(self) -> Ints:
        return NOTHING
