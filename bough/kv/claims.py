"""Claims on the cache: what programs and clients want to keep in it, and for how long."""

from __future__ import annotations

import heapq
from collections import Counter

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.base.program import Lease, LeaseAnswer
from bough.kv.node import CacheHandle, Match, Node
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree

LEASE_SHARE = 0.3
"""Share of the pool that leases may keep; a named tenant gets at most half of it."""
LEASES = 4096
"""Most leases at a time."""
LEASE_SECONDS = 3600.0
"""Longest lease; a longer wish is clipped."""


class Claims:
    """Favours, ends and leases on the nodes of one tree. Times are seconds of the scheduler's clock.

    Without a tree, or under an eviction policy that does not look at claims, favours do nothing and every lease
    is denied.
    """

    def __init__(self, tree: RadixTree | None, policy: ProgramEviction | None, capacity: int) -> None:
        self._tree = tree
        self._policy = policy
        self._budget = int(LEASE_SHARE * capacity)
        self._leases: list[tuple[float, int, Node]] = []
        self._serial = 0
        self.answers: Counter[LeaseAnswer] = Counter()
        """How many leases were answered how."""

    @property
    def leased_tokens(self) -> int:
        return 0 if self._policy is None else sum(self._policy.leased.values())

    def tokens(self, owner: int) -> int:
        """Tokens in the cache that only the program ``owner`` uses."""
        return 0 if self._policy is None else self._policy.tokens(owner)

    def favour(self, owner: int, favoured: bool) -> None:
        """The program ``owner`` is expected back, or no longer is."""
        if self._policy is not None:
            self._policy.favour(owner, favoured)

    def over(self, owner: int) -> None:
        """The program ``owner`` has ended."""
        if self._policy is not None:
            self._policy.over(owner)

    def spend(self, handle: CacheHandle) -> None:
        """Nothing will follow what ``handle`` ends with."""
        if self._policy is not None:
            self._policy.spend(handle.node)

    def lease(self, ns: Namespace, ids: Ints, wish: Lease, now: float) -> tuple[LeaseAnswer, int, float]:
        """Keep the cached prefix of ``ids`` as ``wish`` says: (answer, tokens kept, seconds).

        Clipped where the budget, the longest lease or what is cached allows less than was asked for.
        """
        answer = self._lease(ns, ids, wish, now)
        self.answers[answer[0]] += 1
        return answer

    def _lease(self, ns: Namespace, ids: Ints, wish: Lease, now: float) -> tuple[LeaseAnswer, int, float]:
        tree, policy = self._tree, self._policy
        if tree is None or policy is None or len(self._leases) >= LEASES:
            return "denied", 0, 0.0
        asked = len(ids) if wish.upto is None else min(wish.upto, len(ids))
        asked -= asked % tree.page_size
        room = self._budget - self.leased_tokens
        if ns.tenant:
            room = min(room, self._budget // 2 - policy.leased.get(ns.tenant, 0))
        length = self._affordable(tree.match(ns, ids[:asked]), room)
        length -= length % tree.page_size
        if length <= 0:
            return "denied", 0, 0.0
        seconds = min(wish.ttl, LEASE_SECONDS)
        node = tree.cut(tree.match(ns, ids[:length]))
        policy.lease(node, 1)
        self._serial += 1
        heapq.heappush(self._leases, (now + seconds, self._serial, node))
        return ("granted" if length == asked and seconds == wish.ttl else "clipped"), length, seconds

    @staticmethod
    def _affordable(match: Match, room: int) -> int:
        """How many leading tokens of ``match`` can be leased with ``room`` tokens that are not leased yet."""
        length, node, fresh = match.length, match.node, 0
        path: list[Node] = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            n = min(node.end, length) - node.start
            if not node.leases:
                if fresh + n > room:
                    return node.start + max(0, room - fresh)
                fresh += n
        return length

    def tick(self, now: float) -> None:
        """Leases that have run out end."""
        while self._leases and self._leases[0][0] <= now:
            assert self._policy is not None
            self._policy.lease(heapq.heappop(self._leases)[2], -1)
