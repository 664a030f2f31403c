"""Claims on the cache: what programs and clients want to keep in it, and for how long."""

from __future__ import annotations

import heapq
from collections import Counter

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.base.program import Lease, LeaseAnswer
from bough.base.shares import Shares
from bough.kv.node import CacheHandle, Match, Node
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree

LEASE_SHARE = 0.3
"""Share of the pool that leases may keep. A tenant alone may have all of it; of ``n`` that have leases, each gets an
``n``-th of it from those that have more."""
LEASES = 4096
"""Most leases at a time; beyond, the tenant with most loses his oldest."""
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
        self._page_size = 1 if tree is None else tree.page_size
        self._budget = self._whole(LEASE_SHARE * capacity)
        self._ends: dict[Node, float] = {}  # the leases, by the nodes that they end with
        self._shares: Shares[Node] = Shares()
        self._due: list[tuple[float, int, Node]] = []  # when to look at each of them, or sooner
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

        Clipped where the budget, the longest lease or what is cached allows less than was asked for. A lease on what
        has one already renews it: the later end counts.
        """
        answer = self._lease(ns, ids, wish, now)
        self.answers[answer[0]] += 1
        return answer

    def _lease(self, ns: Namespace, ids: Ints, wish: Lease, now: float) -> tuple[LeaseAnswer, int, float]:
        tree = self._tree
        if tree is None or self._policy is None:
            return "denied", 0, 0.0
        asked = self._whole(len(ids) if wish.upto is None else min(wish.upto, len(ids)))
        match = tree.match(ns, ids[:asked])
        covered = _covered(match)
        length = covered + self._room(ns.tenant, match.length - covered)
        if length <= 0:
            return "denied", 0, 0.0
        node = tree.match(ns, ids[:length]).node
        assert node is not None
        seconds = min(wish.ttl, LEASE_SECONDS)
        self._keep(tree.cut(node, length), now + seconds)
        return ("granted" if length == asked and seconds == wish.ttl else "clipped"), length, seconds

    def _whole(self, n: float) -> int:
        """The tokens of the whole pages among ``n``."""
        return int(n) // self._page_size * self._page_size

    def _room(self, tenant: str, wanted: int) -> int:
        """How many of ``wanted`` tokens more ``tenant`` may lease.

        Those that are free; up to its share also what others have beyond theirs, which is taken from them.
        """
        assert self._policy is not None
        leased = self._policy.leased
        share = self._whole(self._budget // len(leased.keys() | {tenant}))
        room = min(wanted, max(self._budget - self.leased_tokens, share - leased.get(tenant, 0)))
        while (missing := room - (self._budget - self.leased_tokens)) > 0:
            most = max(leased, key=lambda name: leased[name])
            self._take_back(most, min(missing, leased[most] - share))
        return room

    def _take_back(self, tenant: str, n: int) -> None:
        """The oldest lease of ``tenant`` ends, or where that gives more than ``n`` tokens, is so much shorter.

        What is left of it counts as his newest.
        """
        assert self._tree is not None
        _, node = self._shares.oldest(tenant)
        ends, length = self._ends[node], node.end
        above, alone = node, 0
        while above.parent is not None and above.leases == 1:
            above, alone = above.parent, alone + above.n_tokens
        self._end(node)
        if alone > n:
            self._keep(self._tree.cut(node, length - n), ends)

    def _keep(self, node: Node, ends: float) -> None:
        """One lease on everything up to the end of ``node``, in the place of those that it is more than."""
        assert self._policy is not None
        if ends > self._ends.get(node, float("-inf")):
            if node not in self._ends:
                self._policy.lease(node, 1)
                self._serial += 1
                heapq.heappush(self._due, (ends, self._serial, node))
            self._ends[node] = ends
        self._shares.put(node.ns.tenant, node)
        above = node.parent
        while above is not None:
            if self._ends.get(above, float("inf")) <= self._ends[node]:
                self._end(above)
            above = above.parent
        if self._shares.size > LEASES:
            self._end(self._shares.oldest()[1])
        if len(self._due) > 2 * LEASES:
            self._due = [(ends, i, node) for i, (node, ends) in enumerate(self._ends.items())]
            self._serial = len(self._due)
            heapq.heapify(self._due)

    def _end(self, node: Node) -> None:
        assert self._policy is not None
        del self._ends[node]
        self._shares.pop(node.ns.tenant, node)
        self._policy.lease(node, -1)

    def tick(self, now: float) -> None:
        """Leases that have run out end."""
        while self._due and self._due[0][0] <= now:
            _, serial, node = heapq.heappop(self._due)
            ends = self._ends.get(node, float("-inf"))
            if ends > now:
                heapq.heappush(self._due, (ends, serial, node))
            elif node in self._ends:
                self._end(node)


def _covered(match: Match) -> int:
    """How many leading tokens of ``match`` are leased; whatever is above something leased is, too."""
    node = match.node
    while node is not None and not node.leases:
        node = node.parent
    return 0 if node is None else min(node.end, match.length)
