"""The waiting requests: a policy's order, the cache's match lengths and a bound on waiting."""

from __future__ import annotations

import heapq

from bough.kv.waiting import WaitingIndex
from bough.scheduler.policy import Policy
from bough.scheduler.req import Req

OVERDUE_SHARE = 4
"""While somebody is overdue, every 4th admission goes to the oldest request. So a policy keeps three
quarters of its choice under any load, and nobody waits longer than four times the requests before it."""


class WaitQueue:
    """Requests that could run now and have no row."""

    def __init__(self, policy: Policy, index: WaitingIndex, max_wait: float) -> None:
        self._policy = policy
        self._index = index
        self._max_wait = max_wait
        self._reqs: dict[int, Req] = {}
        self._oldest: list[int] = []
        self._passed_over = 0
        self.tokens = 0

    @property
    def preemptive(self) -> bool:
        return self._policy.preemptive

    def __len__(self) -> int:
        return len(self._reqs)

    def reqs(self) -> list[Req]:
        return list(self._reqs.values())

    def holds(self, req: Req) -> bool:
        return self._reqs.get(req.order) is req

    def length(self, req: Req) -> int:
        """How many tokens of ``req``, which waits, are in the cache."""
        return self._index.length(req.order)

    def push(self, req: Req) -> None:
        """Add ``req``, whose ``ids`` are up to date."""
        self._index.add(req.order, req.request.namespace, req.ids, req.match_limit)
        self._reqs[req.order] = req
        self.tokens += len(req.ids)
        if not self._policy.ages(req):
            heapq.heappush(self._oldest, req.order)
        self._policy.push(req, self._index.length(req.order))

    def remove(self, req: Req) -> None:
        """Forget ``req``."""
        self._index.remove(req.order)
        self._policy.discard(req)
        self.tokens -= len(req.ids)
        del self._reqs[req.order]

    def take(self, req: Req) -> None:
        """Remove ``req`` because it was admitted."""
        self._passed_over = 0 if req is self._first() else self._passed_over + 1
        self.remove(req)

    def head(self, now: float) -> Req | None:
        """Whose turn it is at ``now`` (seconds); the request stays in the queue."""
        if changed := self._index.changed():
            self._policy.changed((self._reqs[order], self._index.length(order)) for order in changed)
        oldest = self._first()
        if oldest is not None and self._passed_over >= OVERDUE_SHARE - 1 and now - oldest.arrival > self._max_wait:
            return oldest
        return self._policy.head()

    def _first(self) -> Req | None:
        while self._oldest and self._oldest[0] not in self._reqs:
            heapq.heappop(self._oldest)
        return self._reqs[self._oldest[0]] if self._oldest else None
