"""ARC (Megiddo and Modha, FAST 2003) for the leaves of a tree, with sizes in tokens.

A node is *recent* (T1) until a later request finds it, then *frequent* (T2). Evicted runs of tokens leave a
ghost in B1 or B2. When tokens come back whose ghost is remembered, the target size ``p`` of T1 moves towards
the list that would have kept them, and their node is frequent at once.

A ghost is filed under a hash of the path up to and including the first page of the evicted run, since that is
where a later sequence would miss it. The hash of a path is sum(token * R**position) mod 2**64: additive, so
splits and trims update it from the moved tokens alone. Collisions can only misplace a ghost, never a token.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from bough.base.messages import Namespace
from bough.kv.eviction import LeafHeap
from bough.kv.node import WIDTH, Node

MASK = (1 << 64) - 1
MULTIPLIER = 0x9E3779B97F4A7C15
MAX_GHOSTS = 1 << 16
"""Bound on the entries of each ghost list, besides the bound on their tokens."""


class PathHash:
    """Additive hashes of token runs by their absolute positions."""

    def __init__(self) -> None:
        self._powers: NDArray[np.uint64] = np.ones(1, dtype=np.uint64)

    def of(self, key: bytes | bytearray, start: int) -> int:
        """Hash of the tokens ``key`` (int32 bytes) at positions from ``start``; 0 for none."""
        tokens = np.frombuffer(key, dtype=np.int32).astype(np.uint64) + np.uint64(1)
        end = start + len(tokens)
        if end > len(self._powers):
            factors = np.full(max(end, 2 * len(self._powers)), MULTIPLIER, dtype=np.uint64)
            factors[0] = 1
            self._powers = np.cumprod(factors, dtype=np.uint64)
        return int((tokens * self._powers[start:end]).sum(dtype=np.uint64))

    @staticmethod
    def of_root(ns: Namespace) -> int:
        """Where the paths of a namespace begin; the same in every process."""
        parts = "\0".join((ns.model, ns.adapter, ns.tenant, ns.salt)).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "little")


class GhostList:
    """Evicted runs of tokens, oldest first."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self._runs: OrderedDict[int, int] = OrderedDict()

    def add(self, path: int, n_tokens: int) -> None:
        self.take(path)
        self._runs[path] = n_tokens
        self.n_tokens += n_tokens

    def take(self, path: int) -> int:
        """Forget the run filed under ``path``; its size, 0 when there is none."""
        n = self._runs.pop(path, 0)
        self.n_tokens -= n
        return n

    def shrink(self, most_tokens: int) -> None:
        """Forget the oldest runs until at most ``most_tokens`` and MAX_GHOSTS runs are left."""
        while self._runs and (self.n_tokens > most_tokens or len(self._runs) > MAX_GHOSTS):
            self.n_tokens -= self._runs.popitem(last=False)[1]


class AdaptiveEviction:
    """ARC. Its capacity is the most tokens that the tree has held."""

    def __init__(self) -> None:
        self._hash = PathHash()
        self._paths: dict[Node, int] = {}
        self._frequent: set[Node] = set()
        self._offered = (LeafHeap(), LeafHeap())
        self._ghosts = (GhostList(), GhostList())
        self._tokens = [0, 0]
        self._capacity = 0
        self._target = 0.0
        self._page_bytes = 0

    def used(self, node: Node) -> None:
        self._promote(node)

    def grew(self, node: Node, old_end: int) -> None:
        parent = node.parent
        assert parent is not None, "a root holds no tokens"
        if not self._page_bytes:
            self._page_bytes = len(next(iter(parent.children)))
        if old_end == node.start:
            path = self._paths[parent] if parent.parent is not None else PathHash.of_root(parent.ns)
        else:
            path = self._paths[node]
        fresh = node.key[(old_end - node.start) * WIDTH :]
        self._paths[node] = (path + self._hash.of(fresh, old_end)) & MASK
        self._tokens[node in self._frequent] += node.end - old_end
        self._capacity = max(self._capacity, sum(self._tokens))
        self._recall(node, (path + self._hash.of(fresh[: self._page_bytes], old_end)) & MASK)

    def shared(self, node: Node, before: int) -> None:
        pass

    def split(self, upper: Node, lower: Node) -> None:
        self._paths[upper] = (self._paths[lower] - self._hash.of(lower.key, lower.start)) & MASK
        if lower in self._frequent:
            self._frequent.add(upper)

    def shrank(self, node: Node, tail: bytes, evicted: bool) -> None:
        which = node in self._frequent
        n = len(tail) // WIDTH
        self._tokens[which] -= n
        path = (self._paths[node] - self._hash.of(tail, node.end)) & MASK
        if node.end == node.start:
            del self._paths[node]
            self._frequent.discard(node)
        else:
            self._paths[node] = path
        if evicted:
            recent, frequent = self._ghosts
            self._ghosts[which].add((path + self._hash.of(tail[: self._page_bytes], node.end)) & MASK, n)
            recent.shrink(max(0, self._capacity - self._tokens[0]))
            frequent.shrink(max(0, self._capacity - recent.n_tokens))

    def offer(self, node: Node) -> None:
        self._offered[node in self._frequent].push(node, (node.stamp, 0))

    def withdraw(self, node: Node) -> None:
        self._offered[node in self._frequent].remove(node)

    def victim(self) -> Node | None:
        recent, frequent = (heap.peek() for heap in self._offered)
        if recent is not None and (frequent is None or self._tokens[0] > self._target):
            return recent
        return frequent

    def prefers(self, node: Node, victim: Node) -> bool:
        return True  # whatever is new takes the place of the victim

    def _promote(self, node: Node) -> None:
        if node not in self._frequent:
            self._frequent.add(node)
            self._tokens[0] -= node.n_tokens
            self._tokens[1] += node.n_tokens

    def _recall(self, node: Node, path: int) -> None:
        """Learn from the ghost of tokens that came back with ``node``."""
        recent, frequent = self._ghosts
        sizes = max(1, recent.n_tokens), max(1, frequent.n_tokens)
        if n := recent.take(path):
            self._target = min(float(self._capacity), self._target + n * max(1.0, sizes[1] / sizes[0]))
        elif n := frequent.take(path):
            self._target = max(0.0, self._target - n * max(1.0, sizes[0] / sizes[1]))
        else:
            return
        self._promote(node)
