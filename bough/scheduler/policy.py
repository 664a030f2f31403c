"""Scheduling policies: which waiting request is next.

A policy sees requests come and go and match lengths change; it never looks at all of them. Whatever the
policy says, :class:`bough.scheduler.queue.WaitQueue` bounds how long a request can be passed over.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Protocol

from bough.base.registry import Registry
from bough.kv.waiting import WaitingIndex
from bough.scheduler.programs import Programs
from bough.scheduler.req import Req

Key = tuple[float, ...]

REBUILD_SHARE = 8
"""A heap is made anew when more than this part of it changes: an entry of a new heap costs an eighth of a push."""


class Policy(Protocol):
    """Order of the waiting requests.

    ``preemptive``: a waiting head may push a running request out.
    """

    preemptive: bool

    def ages(self, req: Req) -> bool:
        """The policy itself bounds how long ``req`` waits."""
        ...

    def push(self, req: Req, length: int) -> None:
        """``req`` waits; ``length`` of its tokens are in the cache."""
        ...

    def discard(self, req: Req) -> None:
        """``req`` no longer waits."""
        ...

    def changed(self, lengths: Iterable[tuple[Req, int]]) -> None:
        """The match lengths of these requests, which wait, are new; a shared prefix changes many at once."""
        ...

    def head(self) -> Req | None:
        """The next request, which stays; None when nobody waits."""
        ...


class KeyPolicy:
    """Smallest key first, ties by arrival; a heap whose stale entries are dropped when they surface.

    Requests that have run before come first among equals: their tokens are in the cache now, and somebody
    is already reading their stream.
    """

    def __init__(
        self, key: Callable[[Req, int], Key], *, follows_cache: bool = False, preemptive: bool = False
    ) -> None:
        self.preemptive = preemptive
        self._key = key
        self._follows_cache = follows_cache
        self._heap: list[tuple[Key, int]] = []
        self._waiting: dict[int, tuple[Key, Req]] = {}

    def ages(self, req: Req) -> bool:
        return False

    def push(self, req: Req, length: int) -> None:
        key = self._key(req, length)
        self._waiting[req.order] = (key, req)
        heapq.heappush(self._heap, (key, req.order))

    def discard(self, req: Req) -> None:
        del self._waiting[req.order]
        if len(self._heap) > 64 + 4 * len(self._waiting):
            self._rebuild()

    def changed(self, lengths: Iterable[tuple[Req, int]]) -> None:
        if self._follows_cache:
            entries: list[tuple[Key, int]] = []
            for req, length in lengths:
                key = self._key(req, length)
                self._waiting[req.order] = (key, req)
                entries.append((key, req.order))
            if len(entries) > len(self._heap) // REBUILD_SHARE:
                self._rebuild()
                return
            for entry in entries:
                heapq.heappush(self._heap, entry)

    def _rebuild(self) -> None:
        self._heap = [(key, order) for order, (key, _) in self._waiting.items()]
        heapq.heapify(self._heap)

    def head(self) -> Req | None:
        while self._heap:
            key, order = self._heap[0]
            entry = self._waiting.get(order)
            if entry is not None and entry[0] == key:
                return entry[1]
            heapq.heappop(self._heap)
        return None


class DepthFirst:
    """Walk the tree depth first, the subtree with most waiting requests first, so that a subtree's requests
    run together while its tokens are in the cache (Zheng et al. 2024, section 3: optimal offline order).

    The order is found again only after something changed, and costs time in proportion to the queue.
    """

    preemptive = False

    def __init__(self, index: WaitingIndex) -> None:
        self._index = index
        self._waiting: dict[int, Req] = {}
        self._started: dict[int, Req] = {}
        self._order: list[int] | None = None

    def ages(self, req: Req) -> bool:
        return False

    def push(self, req: Req, length: int) -> None:
        self._waiting[req.order] = req
        if req.started:
            self._started[req.order] = req
        self._order = None

    def discard(self, req: Req) -> None:
        del self._waiting[req.order]
        self._started.pop(req.order, None)

    def changed(self, lengths: Iterable[tuple[Req, int]]) -> None:
        self._order = None

    def head(self) -> Req | None:
        if self._started:
            return self._started[min(self._started)]
        if self._order is None:
            self._order = list(self._index.depth_first())
            self._order.reverse()
        while self._order:
            req = self._waiting.get(self._order[-1])
            if req is not None:
                return req
            self._order.pop()
        return None


PolicyFactory = Callable[[WaitingIndex, Callable[[], int], Programs], Policy]
POLICIES: Registry[PolicyFactory] = Registry("scheduling policy")
for _name in ("lpm", "fcfs", "dfs", "priority", "random"):
    POLICIES.add(_name, f"bough.scheduler.policy:{_name}")
POLICIES.add("program", "bough.scheduler.program_policy:ProgramPolicy")


def lpm(index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> Policy:
    """Longest prefix match first."""
    return KeyPolicy(lambda req, length: (not req.started, -length), follows_cache=True)


def fcfs(index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> Policy:
    """First come, first served."""
    return KeyPolicy(lambda req, length: (not req.started,))


def dfs(index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> Policy:
    """Depth first through the tree."""
    return DepthFirst(index)


def priority(index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> Policy:
    """Largest priority first; a running request of lower priority makes room."""
    return KeyPolicy(lambda req, length: (-req.request.priority, not req.started), preemptive=True)


def random(index: WaitingIndex, draw: Callable[[], int], programs: Programs) -> Policy:
    """Any order; ``draw`` is the injected source of randomness."""
    return KeyPolicy(lambda req, length: (not req.started, draw()))
