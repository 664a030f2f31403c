"""Which unlocked leaf goes first.

The tree offers a node when it becomes an unlocked leaf and withdraws it when it stops being one. Offered
nodes are kept in heaps with lazy deletion, so the next victim costs O(log leaves) whatever the tree's size.
What a policy ranks by (stamp, born, hits) does not change while a node is offered.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

from bough.base.registry import Registry
from bough.kv.node import Node

Rank = tuple[int, int]


class EvictionPolicy(Protocol):
    """Orders the unlocked leaves."""

    def used(self, node: Node) -> None:
        """A later request found ``node`` (not offered at that moment)."""
        ...

    def grew(self, node: Node, old_end: int) -> None:
        """``node`` gained ``[old_end, node.end)``; it is new when ``old_end == node.start``."""
        ...

    def shared(self, node: Node, before: int) -> None:
        """``node``, which only the program ``before`` used, has another user now (not offered at that moment)."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` is new and took the head of ``lower``; the node that was offered stays ``lower``."""
        ...

    def shrank(self, node: Node, tail: bytes, evicted: bool) -> None:
        """``node`` lost the tokens ``tail`` (int32 bytes) at its end; ``evicted`` is False when they were discarded."""
        ...

    def offer(self, node: Node) -> None:
        """``node`` may be evicted from now on."""
        ...

    def withdraw(self, node: Node) -> None:
        """``node``, which was offered, may not be evicted any more."""
        ...

    def victim(self) -> Node | None:
        """The offered node that goes next; it stays offered. None when nothing is."""
        ...

    def prefers(self, node: Node, victim: Node) -> bool:
        """Whether ``node``, which is not in the tree, is worth more than ``victim``, which is the next to go."""
        ...


class LeafHeap:
    """A priority queue of nodes, smallest rank first, with O(1) lazy removal."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Node]] = []
        self._ticket: dict[Node, int] = {}
        self._tickets = 0

    def __contains__(self, node: Node) -> bool:
        return node in self._ticket

    def push(self, node: Node, rank: Rank) -> None:
        self._tickets += 1
        self._ticket[node] = self._tickets
        heapq.heappush(self._heap, (rank, self._tickets, node))
        if len(self._heap) > 2 * len(self._ticket) + 64:
            # Stale entries outnumber the live ones: sweep them, at O(1) per push that left one behind.
            self._heap = [entry for entry in self._heap if self._ticket.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def remove(self, node: Node) -> None:
        del self._ticket[node]

    def peek(self) -> Node | None:
        while self._heap:
            _, ticket, node = self._heap[0]
            if self._ticket.get(node) == ticket:
                return node
            heapq.heappop(self._heap)
        return None


class RankedEviction:
    """Evicts the leaf of the smallest ``rank``."""

    def __init__(self, rank: Callable[[Node], Rank]) -> None:
        self._rank = rank
        self._heap = LeafHeap()

    def used(self, node: Node) -> None:
        pass

    def grew(self, node: Node, old_end: int) -> None:
        pass

    def shared(self, node: Node, before: int) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        pass

    def shrank(self, node: Node, tail: bytes, evicted: bool) -> None:
        pass

    def offer(self, node: Node) -> None:
        self._heap.push(node, self._rank(node))

    def withdraw(self, node: Node) -> None:
        self._heap.remove(node)

    def victim(self) -> Node | None:
        return self._heap.peek()

    def prefers(self, node: Node, victim: Node) -> bool:
        return self._rank(victim) < self._rank(node)


def lru() -> RankedEviction:
    """Least recently used first: used means locked, published to, or unlocked."""
    return RankedEviction(lambda node: (node.stamp, 0))


def lfu() -> RankedEviction:
    """Least often found first; among equals the least recently used."""
    return RankedEviction(lambda node: (node.hits, node.stamp))


def fifo() -> RankedEviction:
    """Oldest first, however much it is used."""
    return RankedEviction(lambda node: (node.born, 0))


EVICTIONS: Registry[Callable[[], EvictionPolicy]] = Registry("eviction policy")
EVICTIONS.add("lru", "bough.kv.eviction:lru")
EVICTIONS.add("lfu", "bough.kv.eviction:lfu")
EVICTIONS.add("fifo", "bough.kv.eviction:fifo")
EVICTIONS.add("arc", "bough.kv.arc:AdaptiveEviction")
EVICTIONS.add("program", "bough.kv.program_eviction:ProgramEviction")
