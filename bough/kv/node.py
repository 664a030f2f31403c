"""The parts of the radix tree: nodes, handles, matches, and who is told of changes.

Tokens and locs are kept as the bytes of int32 arrays: a bytearray grows at its end in amortised O(1), loses
its head or tail in O(1), and compares at the speed of memcmp.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Ints

WIDTH = 4
"""Bytes of one token or loc."""

NOBODY, SHARED = 0, -1
"""Owners of a node that no program, or more than one request, uses; programs have numbers from 1 on."""


def to_bytes(values: Ints) -> bytes:
    """Native int32 bytes of ``values``."""
    return np.asarray(values, dtype=np.int32).tobytes()


def to_ints(raw: bytes | bytearray) -> Ints:
    """A read-only int32 array with a copy of ``raw``."""
    return np.frombuffer(bytes(raw), dtype=np.int32)


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b)) // WIDTH
    if not n:
        return 0
    different = np.frombuffer(a, dtype=np.int32, count=n) != np.frombuffer(b, dtype=np.int32, count=n)
    first = int(different.argmax())
    return first if different[first] else n


class Node:
    """The tokens at positions ``[start, end)`` of every sequence that passes here.

    Attributes:
        ns: namespace of the tree that the node belongs to.
        parent: None for a root. A removed node keeps its parent.
        key, locs: int32 bytes, one token and one loc per position; empty for roots and removed nodes.
        children: by the bytes of their first page.
        locks: number of live handles at or below this node.
        stamp: logical time of the last use.
        born: logical time of creation.
        hits: times the node was found by a later request.
        offered: whether it is a candidate for eviction (an unlocked leaf).
        owner: number of the program that uses it, NOBODY or SHARED.
        spent: whoever left it said that nothing will follow, and nobody has used it since.
        leases: number of leases that keep it.
    """

    __slots__ = (
        "born",
        "children",
        "end",
        "hits",
        "key",
        "leases",
        "locks",
        "locs",
        "ns",
        "offered",
        "owner",
        "parent",
        "spent",
        "stamp",
        "start",
    )

    def __init__(self, ns: Namespace, parent: Node | None, start: int, key: bytes, locs: bytes, now: int) -> None:
        self.ns = ns
        self.parent = parent
        self.start = start
        self.end = start + len(key) // WIDTH
        self.key = bytearray(key)
        self.locs = bytearray(locs)
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.stamp = now
        self.born = now
        self.hits = 0
        self.offered = False
        self.owner = NOBODY
        self.spent = False
        self.leases = 0

    @property
    def n_tokens(self) -> int:
        return self.end - self.start


class CacheHandle:
    """A locked position: the end of ``node``. It keeps its place when nodes are split or grow below it.

    ``owner`` is the program on whose behalf it was taken, or NOBODY.
    """

    __slots__ = ("node", "owner")

    def __init__(self, node: Node, owner: int = NOBODY) -> None:
        self.node = node
        self.owner = owner

    @property
    def length(self) -> int:
        """Tokens from the root to the handle."""
        return self.node.end

    def locs(self) -> Ints:
        """[length] int32, read-only: the locs of the whole path, in O(depth) copies."""
        parts = []
        node: Node | None = self.node
        while node is not None:
            parts.append(node.locs)
            node = node.parent
        return np.frombuffer(b"".join(reversed(parts)), dtype=np.int32)

    def follows(self, page: Ints) -> bool:
        """Whether the tree already goes on after the handle with the tokens of ``page`` (one whole page)."""
        return to_bytes(page) in self.node.children


class Match(NamedTuple):
    """Where a sequence leaves the tree. Good until the tree changes shape.

    Attributes:
        length: matched tokens, a multiple of the page size.
        node: the deepest node with a matched token; a root, or None where there is no root, for length 0.
        ns: the namespace that was searched.
        version: of the tree's shape at that time.
    """

    length: int
    node: Node | None
    ns: Namespace
    version: int

    @property
    def offset(self) -> int:
        """Matched tokens within ``node``."""
        return self.length - self.node.start if self.node is not None else 0

    def locs(self) -> Ints:
        """[length] int32, read-only: the locs of what was found."""
        if self.node is None or self.node.parent is None:
            return np.zeros(0, dtype=np.int32)
        above = CacheHandle(self.node.parent).locs()
        return np.concatenate((above, to_ints(self.node.locs[: self.offset * WIDTH])))


class TreeObserver(Protocol):
    """Is told of every change of the tree, right after it."""

    def on_extend(self, node: Node, old_end: int) -> None:
        """``node`` gained the positions ``[old_end, node.end)``; it is new when ``old_end == node.start``."""
        ...

    def on_split(self, upper: Node, lower: Node) -> None:
        """``upper`` is new and took the head of ``lower``, whose parent it now is."""
        ...

    def on_shrink(self, node: Node) -> None:
        """The leaf ``node`` now stops at ``node.end``; it is gone when that is ``node.start``."""
        ...


class NullObserver:
    """Nobody watches."""

    def on_extend(self, node: Node, old_end: int) -> None:
        pass

    def on_split(self, upper: Node, lower: Node) -> None:
        pass

    def on_shrink(self, node: Node) -> None:
        pass
