"""What is computed ahead: a watch over whom it may disturb."""

from __future__ import annotations

from bough.base.messages import Prefetch as PrefetchMessage
from bough.kv.manager import KVManager
from bough.kv.node import Node
from bough.kv.program_eviction import ProgramEviction
from bough.scheduler.background import BESIDE
from bough.scheduler.loop import Scheduler
from bough.scheduler.planner import Flight

from .invariants import nodes, tree_of
from .pipeline import require
from .script import Prefetch

NAME = "I22 ahead"


def as_message(event: Prefetch) -> PrefetchMessage:
    request = event.what.request
    assert request.program is not None
    return PrefetchMessage(request.ids, request.namespace, request.program.id)


class Ahead:
    """Watches the planner: nobody is disturbed by what runs ahead, and it is counted right."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, tokens: int) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._step_tokens = tokens
        self.computed = 0
        self._watch_plans()
        self._watch_evictions()

    def _watch_plans(self) -> None:
        planner, scheduler = self._scheduler._planner, self._scheduler
        next_plan, retract = planner.next, planner.retract

        def watched(settled: bool) -> Flight | None:
            flight = next_plan(settled)
            if flight is not None:
                self._planned(flight)
            return flight

        def watched_retract(row: int) -> None:
            live = [req.request.rid for req in scheduler._rows.reqs if req is not None and req.background]
            require(not live, NAME, "a request lost its row while {} ran", live)
            retract(row)

        planner.next = watched  # type: ignore[method-assign]
        planner.retract = watched_retract  # type: ignore[method-assign]

    def _planned(self, flight: Flight) -> None:
        scheduler = self._scheduler
        ahead = [i for i, req in enumerate(flight.reqs) if req.background]
        if not ahead:
            return
        n_new = flight.plan.n_new
        n = int(n_new[ahead].sum())
        others = int(n_new.sum()) - n
        self.computed += n
        require(len(ahead) == 1, NAME, "{} rows at a time", len(ahead))
        req = flight.reqs[ahead[0]]
        state = req.program
        known = state is not None and scheduler._programs.find(*state.key) is state and not state.ended
        require(known, NAME, "a program is over, and something is computed ahead of it")
        require(state is not None and state.key[0] == req.request.namespace.tenant, NAME, "another tenant's")
        head = scheduler._queue.head(scheduler._clock())
        require(head is None, NAME, "{} waits while something runs ahead", head and head.request.rid)
        rows = scheduler._rows
        for row in rows.running.tolist():
            left = rows.n_ids[row] + rows.ahead[row] - rows.planned[row] - rows.held[row]
            more = rows.ahead[row] == 0 and rows.live[row] and not rows.background[row] and left > 0
            require(not more, NAME, "row {} was left out while something runs ahead", row)
        require(not others or n <= max(1, others // BESIDE), NAME, "{} tokens beside {}", n, others)

    def _watch_evictions(self) -> None:
        kv, tree = self._kv, tree_of(self._kv)
        policy = tree._policy if tree is not None else None
        if tree is None or not isinstance(policy, ProgramEviction):
            return
        spare = kv.spare

        def watched(row: int, n: int, owner: int) -> int:
            fresh = Node(kv._namespaces[row], None, 0, b"", b"", 0)
            fresh.owner = owner
            own = policy._class(fresh)
            worth = {node: node.n_tokens for node in nodes(tree) if policy._class(node) > own}
            found = spare(row, n, owner)
            for node, n_tokens in worth.items():
                require(node.n_tokens == n_tokens, NAME, "{} tokens that are worth more were evicted", n_tokens)
            return found

        kv.spare = watched  # type: ignore[method-assign]

    def add_up(self) -> None:
        """The counters at the end."""
        stats = self._scheduler.stats().programs
        require(stats.prefetched_tokens == self.computed, NAME, "{} of {}", stats.prefetched_tokens, self.computed)
        require(0 <= stats.used_tokens <= self.computed, NAME, "{} used of {}", stats.used_tokens, self.computed)
