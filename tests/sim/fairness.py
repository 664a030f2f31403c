"""Who was admitted before whom: the policy's order, the bound on waiting, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.kv.manager import Admission, KVManager
from bough.kv.node import NOBODY, CacheHandle, Match
from bough.kv.radix import RadixTree
from bough.scheduler.loop import Scheduler
from bough.scheduler.planner import MAX_RETRACTIONS
from bough.scheduler.queue import OVERDUE_SHARE
from bough.scheduler.req import Req, Status

from .invariants import nodes, tree_of
from .pipeline import require
from .script import Settings


class Fairness:
    """Watches the queue's admissions, the planner's retractions and the tree's evictions."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, settings: Settings, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._settings = settings
        self._clock = clock
        self._passed = 0
        self._lengths: dict[int, int] = {}
        self._watch_queue()
        self._watch_planner()
        tree = tree_of(kv)
        if tree is not None and settings.eviction == "lru":
            self._watch_tree(tree)

    # -- admissions

    def _watch_queue(self) -> None:
        queue, kv = self._scheduler._queue, self._kv
        take, admit = queue.take, kv.admit

        def watched(req: Req) -> None:
            self._admitted(req)
            take(req)

        def watched_admit(ns: Namespace, ids: Ints, limit: int, owner: int = NOBODY) -> Admission | None:
            # As the policy saw them: room for a row may be made of what it matched, where its window is gone.
            self._lengths = {
                req.order: kv.match_len(req.request.namespace, req.ids, req.match_limit) for req in queue.reqs()
            }
            return admit(ns, ids, limit, owner)

        queue.take = watched  # type: ignore[method-assign]
        if self._settings.policy == "lpm":
            kv.admit = watched_admit  # type: ignore[method-assign]

    def _admitted(self, req: Req) -> None:
        queue = self._scheduler._queue
        waiting = queue.reqs()
        require(req in waiting, "I13 order", "somebody was admitted who did not wait")
        # Programs have turns instead, which the ledger checks.
        aged = [other for other in waiting if self._settings.policy != "program" or other.program is None]
        oldest = min(aged, key=lambda other: other.order, default=req)
        if req is oldest:
            self._passed = 0
            return
        if req in self._scheduler._planner.suspects:
            return
        if self._clock() - oldest.arrival > self._settings.max_wait:
            self._passed += 1
            require(self._passed < OVERDUE_SHARE, "I10 waiting", "{} passed over {}", self._passed, oldest.request.rid)
        key = self._key()
        if key is not None:
            best = min(waiting, key=key)
            require(req is best, "I13 order", "{} was admitted before {}", req.request.rid, best.request.rid)

    def _key(self) -> Callable[[Req], tuple[object, ...]] | None:
        """The policy's order, from scratch; None for those whose order is their own affair."""
        match self._settings.policy:
            case "fcfs":
                return lambda req: (not req.started, req.order)
            case "priority":
                return lambda req: (-req.request.priority, not req.started, req.order)
            case "lpm":
                return lambda req: (not req.started, -self._lengths[req.order], req.order)
        return None

    # -- retractions

    def _watch_planner(self) -> None:
        planner, rows = self._scheduler._planner, self._scheduler._rows
        retract, make_room = planner.retract, planner._make_room
        head: Req | None = None

        def watched_make_room(victim: Req, req: Req) -> None:
            nonlocal head
            head = self._scheduler._queue.head(self._clock())
            make_room(victim, req)
            head = None

        def watched(row: int) -> None:
            req = rows.req(row)
            require(req.status is Status.RUNNING, "I9 life", "somebody was retracted who has ended")
            require(not rows.in_flight[row], "I9 life", "a row in flight was retracted")
            if head is not None:
                require(head.request.priority > req.request.priority, "I13 order", "an equal was pushed out")
            elif not planner.suspects:
                require(row != int(rows.running[0]), "I10 retraction", "the oldest row was retracted")
            if head is None and req.retractions >= MAX_RETRACTIONS:
                others = [rows.req(other).retractions for other in rows.running.tolist()[1:]]
                require(
                    min(others, default=0) >= MAX_RETRACTIONS or planner.suspects,
                    "I10 retraction",
                    "{} again, after {} times",
                    req.request.rid,
                    req.retractions,
                )
            retract(row)

        planner.retract = watched  # type: ignore[method-assign]
        planner._make_room = watched_make_room  # type: ignore[method-assign]

    # -- evictions

    def _watch_tree(self, tree: RadixTree) -> None:
        """Least recently used first, by a record of uses that is kept per loc and knows nothing of nodes."""
        used = np.zeros(self._settings.n_cells, dtype=np.int64)
        now = 0
        lock, unlock, evict = tree.lock, tree.unlock, tree.evict

        def touch(locs: Ints) -> None:
            nonlocal now
            now += 1
            used[locs] = now

        def watched_lock(match: Match, owner: int = 0) -> CacheHandle:
            handle = lock(match, owner)
            touch(handle.locs())
            return handle

        def watched_unlock(handle: CacheHandle) -> None:
            touch(handle.locs())
            unlock(handle)

        def watched_evict(n_tokens: int) -> Ints:
            held = _locked(tree)
            freed = evict(n_tokens)
            require(not held & set(freed.tolist()), "I4 locked", "locked tokens were evicted")
            size = self._settings.page_size
            enough = n_tokens <= len(freed) < n_tokens + size or not tree.evictable_tokens
            require(enough, "I4 evict", "{} tokens for {}", len(freed), n_tokens)
            left = _leaf_ends(tree)
            if len(freed) and left:
                newest, oldest = int(used[freed].max()), int(used[left].min())
                require(newest <= oldest, "I4 order", "a newer leaf went before an older")
            return freed

        tree.lock, tree.unlock, tree.evict = watched_lock, watched_unlock, watched_evict  # type: ignore[method-assign]


def _locked(tree: RadixTree) -> set[int]:
    """Locs under a live handle."""
    return {loc for handle in tree._handles for loc in handle.locs().tolist()}


def _leaf_ends(tree: RadixTree) -> Sequence[int]:
    """The last loc of every unlocked leaf."""
    return [
        int(np.frombuffer(node.locs, np.int32)[-1])
        for node in nodes(tree)
        if node.parent is not None and not node.children and not node.locks
    ]
