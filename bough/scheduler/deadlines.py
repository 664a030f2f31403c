"""The requests that have to end by a time of their own, earliest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from bough.scheduler.req import Req

SLACK = 64
"""Of deadlines that nobody waits for any more are kept so many, and as many as there are requests."""


class Deadlines:
    """A heap of deadlines of ``reqs``, requests in flight by their ids.

    Most requests end before their deadline, which then stays behind in the heap; sweeping costs O(1) per request.
    """

    def __init__(self, reqs: Mapping[str, Req]) -> None:
        self._reqs = reqs
        self._heap: list[tuple[float, int, str]] = []

    def push(self, req: Req) -> None:
        """``req`` is among the requests and has a deadline."""
        heapq.heappush(self._heap, (req.deadline, req.order, req.request.rid))
        if len(self._heap) > SLACK + 2 * len(self._reqs):
            self._heap = [entry for entry in self._heap if self._live(entry) is not None]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> Iterator[Req]:
        """Those whose deadline has come, each once."""
        while self._heap and self._heap[0][0] <= now:
            if (req := self._live(heapq.heappop(self._heap))) is not None:
                yield req

    def _live(self, entry: tuple[float, int, str]) -> Req | None:
        """The request of an entry, unless it has ended; its id may be another's by now."""
        _, order, rid = entry
        req = self._reqs.get(rid)
        return req if req is not None and req.order == order else None
