"""Match lengths of everything that waits, kept up to date by what changes in the tree.

Each waiting request hangs at the position where it leaves the tree. Those that hang at one position are
grouped in a *bucket* by the page with which they go on, so tokens attached there reach only the requests that
really follow them. A *place* collects the buckets of one node. Positions count from the root and survive
splits, so a split moves buckets, never requests.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Collection, Iterator
from typing import Protocol

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.kv.node import WIDTH, Match, Node, common_tokens, to_bytes, to_ints


class Matching(Protocol):
    """The one thing that the index asks of a cache."""

    def match(self, ns: Namespace, ids: Ints) -> Match:
        """The longest cached prefix of ``ids``. Changes nothing."""
        ...


class _Bucket:
    """The requests that leave the tree at ``position``, which lies in ``(node.start, node.end]``."""

    __slots__ = ("at", "by_next", "position", "size")

    def __init__(self, at: Node | Namespace, position: int) -> None:
        self.at = at
        self.position = position
        self.size = 0
        self.by_next: dict[bytes, dict[int, _Waiter]] = {}


class _Place:
    """The buckets of a node, or of a namespace's position 0; ``weight`` also counts what hangs further down."""

    __slots__ = ("buckets", "children", "positions", "serial", "weight")

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.weight = 0
        self.buckets: dict[int, _Bucket] = {}
        self.positions: list[int] = []
        self.children: dict[Node, None] = {}


class _Waiter:
    __slots__ = ("arrival", "bucket", "id", "raw")

    def __init__(self, id: int, arrival: int, raw: bytes) -> None:
        self.id = id
        self.arrival = arrival
        self.raw = raw
        self.bucket: _Bucket | None = None


class WaitingIndex:
    """Cached prefix lengths of waiting requests. Observes the tree (:class:`bough.kv.node.TreeObserver`).

    Adding a request costs one match and O(depth); a change of the tree costs O(requests whose length changes),
    a split O(positions that move). Those whose length changes are moved in bulk, because a prefix that everybody
    in a long queue shares moves everybody within one step.
    """

    def __init__(self, cache: Matching, page_size: int) -> None:
        self._cache = cache
        self._page_size = page_size
        self._page_bytes = page_size * WIDTH
        self._waiters: dict[int, _Waiter] = {}
        self._places: dict[Node | Namespace, _Place] = {}
        self._roots: dict[Namespace, None] = {}
        self._changed: dict[int, None] = {}
        self._arrivals = 0
        self._serials = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, id: int) -> bool:
        return id in self._waiters

    # -- what the scheduler asks

    def add(self, id: int, ns: Namespace, ids: Ints, limit: int) -> None:
        """Let request ``id`` wait with the tokens ``ids`` (int32), at most ``limit`` of them from the cache.

        ValueError when it waits already.
        """
        if id in self._waiters:
            raise ValueError(f"request {id} waits already")
        usable = max(0, min(limit, len(ids)))
        usable -= usable % self._page_size
        match = self._cache.match(ns, ids[:usable])
        waiter = _Waiter(id, self._arrivals, to_bytes(ids[:usable]))
        self._arrivals += 1
        self._waiters[id] = waiter
        at: Node | Namespace = match.node if match.node is not None and match.length else ns
        below: Node | None = None
        for key in _upwards(at):
            place = self._place(key)
            place.weight += 1
            if below is not None:
                place.children[below] = None
            below = key if isinstance(key, Node) else None
        self._hang([waiter], at, match.length)

    def remove(self, id: int) -> None:
        """Request ``id`` waits no longer; KeyError when it does not."""
        waiter = self._waiters.pop(id)
        self._changed.pop(id, None)
        assert waiter.bucket is not None, "every waiting request hangs somewhere"
        bucket = waiter.bucket
        following = self._following(waiter, bucket.position)
        del bucket.by_next[following][id]
        if not bucket.by_next[following]:
            del bucket.by_next[following]
        self._lighten(bucket, 1)
        for key in _upwards(bucket.at):
            self._places[key].weight -= 1
            self._drop_if_empty(key)

    def length(self, id: int) -> int:
        """min(match, limit) of request ``id`` in whole pages, now."""
        bucket = self._waiters[id].bucket
        assert bucket is not None, "every waiting request hangs somewhere"
        return bucket.position

    def changed(self) -> list[int]:
        """The waiting requests whose length changed since the last call, each once, in order of first change."""
        ids = list(self._changed)
        self._changed.clear()
        return ids

    def depth_first(self) -> Iterator[int]:
        """All waiting ids so that those that share a prefix come together: the heavier branch first, then those
        that leave the tree on the way to it, deeper ones first.

        Branches of equal weight follow in the order in which something first waited there, requests that leave at
        one position in order of arrival. Lazy: taking the first k costs what lies before them.
        """
        roots: dict[Node | Namespace, None] = dict.fromkeys(self._roots)
        pending: list[tuple[bool, Node | Namespace]] = [(False, key) for key in self._lightest_first(roots)]
        while pending:
            entered, key = pending.pop()
            place = self._places[key]
            if not entered:
                pending.append((True, key))
                pending.extend((False, child) for child in self._lightest_first(dict.fromkeys(place.children)))
                continue
            for position in reversed(place.positions):
                groups = place.buckets[position].by_next.values()
                yield from (w.id for w in sorted((w for g in groups for w in g.values()), key=lambda w: w.arrival))

    def _lightest_first(self, keys: dict[Node | Namespace, None]) -> list[Node | Namespace]:
        return sorted(keys, key=lambda key: (self._places[key].weight, -self._places[key].serial))

    # -- what the tree tells

    def on_extend(self, node: Node, old_end: int) -> None:
        """Those that hang where ``node`` went on, and go on alike, follow it as far as they match."""
        source: Node | Namespace = node
        if old_end == node.start:
            assert node.parent is not None, "a root holds no tokens"
            source = _key(node.parent)
        place = self._places.get(source)
        bucket = place.buckets.get(old_end) if place is not None else None
        if place is None or bucket is None:
            return
        fresh = bytes(node.key[(old_end - node.start) * WIDTH :])
        group = bucket.by_next.pop(fresh[: self._page_bytes], None)
        if group is None:
            return
        self._lighten(bucket, len(group))
        if source is not node:
            self._place(node).weight += len(group)
            place.children[node] = None
        for matched, waiters in self._followers(group, old_end, fresh).items():
            self._hang(waiters, node, old_end + matched)
        self._changed.update(dict.fromkeys(group))

    def on_split(self, upper: Node, lower: Node) -> None:
        """The buckets of the head move to ``upper``."""
        place = self._places.get(lower)
        if place is None:
            return
        above = self._places[upper] = _Place(place.serial)
        above.weight = place.weight
        above.children[lower] = None
        k = bisect_right(place.positions, upper.end)
        above.positions, place.positions = place.positions[:k], place.positions[k:]
        for position in above.positions:
            bucket = above.buckets[position] = place.buckets.pop(position)
            bucket.at = upper
            place.weight -= bucket.size
        assert upper.parent is not None, "a root is never split"
        siblings = self._places[_key(upper.parent)].children
        del siblings[lower]
        siblings[upper] = None
        if not place.weight:
            del self._places[lower], above.children[lower]

    def on_shrink(self, node: Node) -> None:
        """Those that hung beyond the new end of ``node`` fall back to it."""
        place = self._places.get(node)
        if place is None:
            return
        assert node.parent is not None, "a root never shrinks"
        gone = node.end == node.start
        target = _key(node.parent) if gone else node
        fallen: dict[int, _Waiter] = {}
        while place.positions and place.positions[-1] > node.end:
            for group in place.buckets.pop(place.positions.pop()).by_next.values():
                fallen.update(group)
        if fallen:
            self._hang(fallen.values(), target, node.end)
            self._changed.update(dict.fromkeys(fallen))
        if gone:
            del self._places[node], self._places[target].children[node]

    # -- upkeep

    def _place(self, key: Node | Namespace) -> _Place:
        place = self._places.get(key)
        if place is None:
            self._serials += 1
            place = self._places[key] = _Place(self._serials)
            if isinstance(key, Namespace):
                self._roots[key] = None
        return place

    def _drop_if_empty(self, key: Node | Namespace) -> None:
        if self._places[key].weight:
            return
        del self._places[key]
        if isinstance(key, Namespace):
            del self._roots[key]
        elif key.parent is not None:
            del self._places[_key(key.parent)].children[key]

    def _followers(self, group: dict[int, _Waiter], start: int, fresh: bytes) -> dict[int, list[_Waiter]]:
        """Part ``group`` by how many tokens of ``fresh``, in whole pages, each goes on with from position ``start``."""
        parts: dict[int, list[_Waiter]] = {}
        begin, page = start * WIDTH, self._page_bytes
        # Most stop where the one before them did: they have the same tokens up to there, and not the page after it.
        alike, beyond, matched = fresh, b"", len(fresh) // WIDTH
        for waiter in group.values():
            raw = waiter.raw
            if not raw.startswith(alike, begin) or (beyond and raw.startswith(beyond, begin + len(alike))):
                matched = common_tokens(raw[begin : begin + len(fresh)], fresh)
                matched -= matched % self._page_size
                alike, beyond = fresh[: matched * WIDTH], fresh[matched * WIDTH : matched * WIDTH + page]
            parts.setdefault(matched, []).append(waiter)
        return parts

    def _hang(self, waiters: Collection[_Waiter], at: Node | Namespace, position: int) -> None:
        """Put ``waiters``, which hang nowhere now, at ``position`` of ``at``."""
        place = self._places[at]
        bucket = place.buckets.get(position)
        if bucket is None:
            bucket = place.buckets[position] = _Bucket(at, position)
            insort(place.positions, position)
        by_next = bucket.by_next
        for waiter in waiters:
            waiter.bucket = bucket
            following = self._following(waiter, position)
            group = by_next.get(following)
            if group is None:
                by_next[following] = {waiter.id: waiter}
            else:
                group[waiter.id] = waiter
        bucket.size += len(waiters)

    def _following(self, waiter: _Waiter, position: int) -> bytes:
        """The page with which ``waiter`` goes on after ``position``.

        Empty for a request that ends there: no page is filed under it, so nothing attached ever moves it.
        """
        return waiter.raw[position * WIDTH : position * WIDTH + self._page_bytes]

    def _lighten(self, bucket: _Bucket, n: int) -> None:
        """``n`` requests have left ``bucket``; it goes when it is empty."""
        bucket.size -= n
        if not bucket.size:
            place = self._places[bucket.at]
            del place.buckets[bucket.position]
            place.positions.pop(bisect_right(place.positions, bucket.position) - 1)

    def check(self) -> None:
        """Compare every length with a fresh match and every weight with a recount; AssertionError on a difference."""
        weights: dict[Node | Namespace, int] = {}
        for waiter in self._waiters.values():
            bucket = waiter.bucket
            assert bucket is not None, "a request hangs nowhere"
            assert waiter.id in bucket.by_next[self._following(waiter, bucket.position)], "a request is misfiled"
            assert self._places[bucket.at].buckets[bucket.position] is bucket, "a bucket is at another place"
            for key in _upwards(bucket.at):
                weights[key] = weights.get(key, 0) + 1
            ns = bucket.at.ns if isinstance(bucket.at, Node) else bucket.at
            assert self._cache.match(ns, to_ints(waiter.raw)).length == bucket.position, "a length is stale"
        assert {key: place.weight for key, place in self._places.items()} == weights, "a weight is wrong"
        for key, place in self._places.items():
            assert place.positions == sorted(place.buckets), "positions and buckets disagree"
            for child in place.children:
                assert child in self._places and child.parent is not None and _key(child.parent) == key, "an orphan"


def _key(node: Node) -> Node | Namespace:
    """Roots come and go while requests wait, so position 0 is filed under the namespace."""
    return node.ns if node.parent is None else node


def _upwards(key: Node | Namespace) -> Iterator[Node | Namespace]:
    """``key`` and what lies above it, up to the namespace."""
    while isinstance(key, Node) and key.parent is not None:
        yield key
        key = _key(key.parent)
    yield key
