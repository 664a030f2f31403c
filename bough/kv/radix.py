"""The radix tree of KV shared by everything in flight.

Invariants (asserted by :meth:`RadixTree.check`): every loc belongs to one node; a node's lock count is the
number of live handles at or below it; exactly the unlocked leaves are offered to the eviction policy; keys
and locs are whole pages; children differ in their first page; a root without children and locks is gone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.kv.eviction import EvictionPolicy
from bough.kv.node import (
    NOBODY,
    SHARED,
    WIDTH,
    CacheHandle,
    Match,
    Node,
    NullObserver,
    TreeObserver,
    common_tokens,
    to_bytes,
)


class RadixTree:
    """(namespace, tokens) -> locs, to the page.

    Time is a counter that increases with every lock, unlock and insert, so equal histories give equal trees.

    Attributes:
        total_tokens, locked_tokens: tokens held, and those of them under a live handle.
    """

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        if page_size < 1:
            raise ValueError(f"the page size must be at least 1, not {page_size}")
        self.page_size = page_size
        self.total_tokens = 0
        self.locked_tokens = 0
        self._policy = policy
        self._observer: TreeObserver = NullObserver()
        self._page_bytes = page_size * WIDTH
        self._roots: dict[Namespace, Node] = {}
        self._handles: dict[CacheHandle, None] = {}
        self._now = 0
        self._version = 0

    @property
    def evictable_tokens(self) -> int:
        return self.total_tokens - self.locked_tokens

    def observe(self, observer: TreeObserver) -> None:
        """Tell ``observer`` of every change from now on, instead of the previous one."""
        self._observer = observer

    # -- reading

    def match(self, ns: Namespace, ids: Ints) -> Match:
        """The longest prefix of ``ids`` (int32) in the tree of ``ns``, in whole pages.

        Compares real tokens, never hashes, and changes nothing: no split, no stamp. O(len(ids)) bytes compared.
        """
        root = self._roots.get(ns)
        if root is None:
            return Match(0, None, ns, self._version)
        raw = to_bytes(ids)
        node, length = self._walk(root, raw)
        return Match(length, node, ns, self._version)

    def _walk(self, node: Node, raw: bytes) -> tuple[Node, int]:
        """Follow ``raw`` down from the end of ``node``: the deepest node with a match, and tokens matched."""
        position, size, page = 0, len(raw), self._page_bytes
        while position < size:
            child = node.children.get(raw[position : position + page])
            if child is None:
                break
            node = child
            rest = raw[position : position + len(child.key)]
            if rest != child.key:
                matched = common_tokens(rest, bytes(child.key)) * WIDTH
                position += matched - matched % page
                break
            position += len(rest)
        return node, position // WIDTH

    # -- locking

    def lock(self, match: Match, owner: int = NOBODY) -> CacheHandle:
        """Keep the matched tokens for ``owner``; splits the last node where the match ends inside it.

        Raises RuntimeError when the tree changed shape after the match was made.
        """
        if match.version != self._version:
            raise RuntimeError("the match is older than the tree's shape")
        node = match.node
        if node is None:
            node = self._roots[match.ns] = Node(match.ns, None, 0, b"", b"", self._now)
        if match.length < node.end:
            node = self._split(node, match.length - node.start)
        self._now += 1
        handle = CacheHandle(node, owner)
        self._handles[handle] = None
        for step in _path(node):
            self._acquire(step)
            self._use(step, owner)
        return handle

    def cut(self, node: Node, length: int) -> Node:
        """The node on the path to ``node`` that ends after ``length`` tokens, more than 0 and at most all.

        A split is no use of what is split.
        """
        while node.start >= length and node.parent is not None:
            node = node.parent
        return self._split(node, length - node.start) if length < node.end else node

    def unlock(self, handle: CacheHandle) -> None:
        """End ``handle``. RuntimeError when it has ended before."""
        if handle not in self._handles:
            raise RuntimeError("the handle is not live")
        del self._handles[handle]
        self._now += 1
        for node in _path(handle.node):
            node.stamp = self._now
            node.locks -= 1
            if not node.locks:
                self.locked_tokens -= node.n_tokens
                self._settle(node)

    def _acquire(self, node: Node) -> None:
        node.locks += 1
        if node.locks == 1:
            self.locked_tokens += node.n_tokens
            if node.offered:
                node.offered = False
                self._policy.withdraw(node)

    def _use(self, node: Node, owner: int) -> None:
        node.stamp = self._now
        node.spent = False
        if node.owner not in (owner, SHARED) or owner == NOBODY:
            before, node.owner = node.owner, SHARED
            if before > NOBODY:
                self._policy.shared(node, before)
        if node.parent is not None:
            node.hits += 1
            self._policy.used(node)

    def _settle(self, node: Node) -> None:
        """After ``node`` lost a lock or a child: offer it, or drop it when it is an empty root."""
        if node.locks or node.children:
            return
        if node.parent is None:
            del self._roots[node.ns]
            self._version += 1
        elif not node.offered:
            node.offered = True
            self._policy.offer(node)

    # -- growing

    def insert(self, handle: CacheHandle, ids: Ints, locs: Ints) -> int:
        """Extend the tree below ``handle`` by the tokens ``ids`` with their ``locs``; the handle moves to their end.

        Both are int32 of the same whole number of pages. Returns d, the number of leading tokens that the tree
        had already: it keeps its own locs for them, and ``locs[:d]`` remain the caller's.
        A leaf that only this handle locks grows in place, so a prompt that comes in chunks stays one node.
        """
        if len(ids) != len(locs) or len(ids) % self.page_size:
            raise ValueError(f"{len(ids)} tokens with {len(locs)} locs are not whole pages of {self.page_size}")
        if handle not in self._handles:
            raise RuntimeError("the handle is not live")
        raw = to_bytes(ids)
        self._now += 1
        node, known = handle.node, 0
        while known < len(raw):
            child = node.children.get(raw[known : known + self._page_bytes])
            if child is None:
                break
            matched = common_tokens(raw[known : known + len(child.key)], bytes(child.key))
            matched -= matched % self.page_size
            if matched < child.n_tokens:
                child = self._split(child, matched)
            self._acquire(child)
            self._use(child, handle.owner)
            node, known = child, known + matched * WIDTH
        if known < len(raw):
            node = self._append(node, raw[known:], to_bytes(locs)[known:], handle.owner)
        handle.node = node
        return known // WIDTH

    def _append(self, node: Node, key: bytes, locs: bytes, owner: int) -> Node:
        """Put fresh tokens after the end of ``node``, which the caller's handle locks; the node that holds them."""
        old_end = node.end
        own = node.owner == owner or owner == NOBODY
        if own and node.parent is not None and node.locks == 1 and not node.children and not node.leases:
            node.key += key
            node.locs += locs
            node.end += len(key) // WIDTH
        else:
            parent, node = node, Node(node.ns, node, old_end, key, locs, self._now)
            parent.children[key[: self._page_bytes]] = node
            node.locks = 1
            node.owner = owner
            self._version += 1
        node.stamp = self._now
        self.total_tokens += node.end - old_end
        self.locked_tokens += node.end - old_end
        self._policy.grew(node, old_end)
        self._observer.on_extend(node, old_end)
        return node

    def _split(self, lower: Node, n_tokens: int) -> Node:
        """Move the first ``n_tokens`` of ``lower`` into a new parent of it. Handles stay at the end of ``lower``."""
        parent = lower.parent
        assert parent is not None, "a root holds no tokens"
        cut = n_tokens * WIDTH
        upper = Node(lower.ns, parent, lower.start, bytes(lower.key[:cut]), bytes(lower.locs[:cut]), lower.born)
        upper.stamp, upper.hits, upper.locks = lower.stamp, lower.hits, lower.locks
        upper.owner, upper.spent, upper.leases = lower.owner, lower.spent, lower.leases
        del lower.key[:cut], lower.locs[:cut]
        lower.start = upper.end
        lower.parent = upper
        parent.children[bytes(upper.key[: self._page_bytes])] = upper
        upper.children[bytes(lower.key[: self._page_bytes])] = lower
        self._version += 1
        self._policy.split(upper, lower)
        self._observer.on_split(upper, lower)
        return upper

    # -- shrinking

    def evict(self, n_tokens: int) -> Ints:
        """Drop ``n_tokens`` unlocked tokens in the policy's order, or all there are, in whole pages. Their locs.

        Of the last leaf only as many pages go as are needed, from its end.
        """
        freed: list[bytes] = []
        missing = n_tokens
        while missing > 0 and (victim := self._policy.victim()) is not None:
            whole = -(-missing // self.page_size) * self.page_size
            missing -= min(whole, victim.n_tokens)
            freed.append(self._trim(victim, max(victim.start, victim.end - whole), evicted=True))
        return np.frombuffer(b"".join(freed), dtype=np.int32)

    def evict_lesser(self, n_tokens: int, owner: int) -> Ints:
        """As :meth:`evict`, but only what the policy takes to be worth less than something new of ``owner``."""
        freed: list[Ints] = []
        missing = n_tokens
        while missing > 0 and (victim := self._policy.victim()) is not None:
            fresh = Node(victim.ns, None, 0, b"", b"", self._now + 1)
            fresh.owner = owner
            if not self._policy.prefers(fresh, victim):
                break
            freed.append(self.evict(min(missing, victim.n_tokens)))
            missing -= len(freed[-1])
        return np.concatenate(freed) if freed else np.zeros(0, dtype=np.int32)

    def flush(self) -> Ints:
        """Drop everything that is not locked. The locs."""
        return self.evict(self.evictable_tokens)

    def discard(self, handle: CacheHandle, length: int) -> Ints:
        """End ``handle`` and forget whatever follows the first ``length`` tokens of its path. The locs.

        For KV that a failed forward was to write. RuntimeError when another live handle needs some of it; then
        nothing is forgotten.
        """
        self.unlock(handle)
        keep = length - length % self.page_size
        node = handle.node
        while node.parent is not None and node.parent.end > keep:
            node = node.parent
        if node.end <= keep:
            return np.zeros(0, dtype=np.int32)
        if node.locks:
            raise RuntimeError("a live handle still reads what is to be discarded")
        below = list(_below(node))[1:]
        freed = [self._trim(child, child.start, evicted=False) for child in reversed(below)]
        freed.append(self._trim(node, max(keep, node.start), evicted=False))
        return np.frombuffer(b"".join(freed), dtype=np.int32)

    def _trim(self, node: Node, end: int, *, evicted: bool) -> bytes:
        """Cut the unlocked leaf ``node`` at position ``end``, remove it when nothing is left. The locs cut off."""
        cut = (end - node.start) * WIDTH
        tail, locs = bytes(node.key[cut:]), bytes(node.locs[cut:])
        if not cut and node.parent is not None:
            node.offered = False
            self._policy.withdraw(node)
            del node.parent.children[tail[: self._page_bytes]]
        del node.key[cut:], node.locs[cut:]
        self.total_tokens -= node.end - end
        node.end = end
        self._version += 1
        self._policy.shrank(node, tail, evicted)
        self._observer.on_shrink(node)
        if not cut and node.parent is not None:
            self._settle(node.parent)
        return locs

    # -- checking

    def check(self) -> Ints:
        """Recompute every count from the handles and the keys; AssertionError where one disagrees.

        Returns all locs in the tree. O(tree), for tests and idle times.
        """
        locks: dict[Node, int] = {}
        for handle in self._handles:
            for node in _path(handle.node):
                locks[node] = locks.get(node, 0) + 1
        total = locked = 0
        parts: list[bytes] = []
        for ns, root in self._roots.items():
            assert root.ns == ns and root.start == root.end == 0 and not root.key, "a root holds tokens"
            assert root.children or root.locks, "an empty root was kept"
            for node in _below(root):
                n = node.n_tokens
                assert node.locks == locks.pop(node, 0), f"lock count {node.locks} is wrong"
                assert len(node.key) == len(node.locs) == n * WIDTH, "key, locs and range disagree"
                assert node.parent is None or n > 0, "an empty node was kept"
                assert n % self.page_size == 0, "a node holds a part of a page"
                leaf = node.parent is not None and not node.children and not node.locks
                assert node.offered == leaf, "not exactly the unlocked leaves are offered"
                for key, child in node.children.items():
                    assert child.parent is node and child.start == node.end and child.ns == ns, "a child is misplaced"
                    assert key == child.key[: self._page_bytes], "a child is filed under another page"
                total += n
                locked += n if node.locks else 0
                parts.append(bytes(node.locs))
        assert not locks, "a handle is on a removed node"
        assert (total, locked) == (self.total_tokens, self.locked_tokens), "the token counters are wrong"
        locs: Ints = np.frombuffer(b"".join(parts), dtype=np.int32)
        assert len(np.unique(locs)) == len(locs), "a loc is in the tree twice"
        return locs


def _path(node: Node | None) -> Iterator[Node]:
    """``node`` and its ancestors, upwards."""
    while node is not None:
        yield node
        node = node.parent


def _below(top: Node) -> Iterator[Node]:
    """``top`` and its descendants; parents before their children."""
    stack = [top]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())
