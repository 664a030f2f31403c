"""Which rows read the same leading cells, so that a device may read them once for all of them.

The tree knows: rows whose handles lie below one node share everything up to its end. Each row joins at most one
group, at the ancestor of its handle that saves it the most reading, so groups are disjoint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bough.base.plan import Index, Ints, SharedPrefix
from bough.kv.node import CacheHandle, Node


class Sharing:
    """The groups of all rows that hold a handle.

    Attributes:
        group: [n_rows] int32 number of the row's group, -1 for none.
        n_tokens: [G] int32 length of each group's prefix.
    """

    def __init__(self, group: Ints, n_tokens: Ints) -> None:
        self.group, self.n_tokens = group, n_tokens
        self._planned: bytes | None = None
        self._found: tuple[SharedPrefix, ...] = ()

    def plan(self, rows: Index, start: Ints) -> tuple[SharedPrefix, ...]:
        """The groups among the planned ``rows`` [B] whose first new tokens are at ``start`` [B].

        A row whose new tokens begin within its group's prefix is the one that writes it: it stays outside. As long as
        the planned rows have the same groups, one after the other, the tuple is the same object.
        """
        if not len(self.n_tokens):
            return ()
        group = self.group[rows]
        group[start < self.n_tokens[group]] = -1
        if (planned := group.tobytes()) == self._planned:
            return self._found
        order = np.argsort(group, kind="stable").astype(np.int32)
        ends = np.searchsorted(group[order], np.arange(-1, len(self.n_tokens)), side="right").tolist()
        self._planned = planned
        self._found = tuple(
            SharedPrefix(order[begin:end], n)
            for begin, end, n in zip(ends, ends[1:], self.n_tokens.tolist())
            if end - begin > 1
        )
        return self._found


def find_sharing(handles: Sequence[CacheHandle | None]) -> Sharing:
    """Group the rows by their handles, in O(rows + nodes above them)."""
    best: dict[Node, Node | None] = {}
    numbers: dict[Node, int] = {}
    group = [-1] * len(handles)
    for row, handle in enumerate(handles):
        if handle is None:
            continue
        node = handle.node
        if node.locks == 1 and node.parent is not None:
            node = node.parent  # nobody else is at a row's own end
        found = best[node] if node in best else _best(node, best)
        if found is not None:
            group[row] = numbers.setdefault(found, len(numbers))
    n_tokens = np.fromiter((node.end for node in numbers), np.int32, len(numbers))
    return Sharing(np.array(group, np.int32), n_tokens)


def _best(node: Node, best: dict[Node, Node | None]) -> Node | None:
    """The ancestor of ``node``, or ``node`` itself, at which a row saves most: all but its share of the reading."""
    fresh: list[Node] = []
    above: Node | None = node
    while above is not None and above.parent is not None and above not in best:
        fresh.append(above)
        above = above.parent
    found = best.get(above) if above is not None else None
    for above in reversed(fresh):
        if above.locks > 1 and (found is None or _saved(above) >= _saved(found)):
            found = above
        best[above] = found
    best[node] = found
    return found


def _saved(node: Node) -> float:
    return node.end * (1 - 1 / node.locks)
