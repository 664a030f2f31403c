"""Eviction by what programs have said: the cache's part of the program envelope.

Every node knows its *owner*, the one program that uses it, or that several requests do. Leaves go in this order, the
least recently used first among equals:

1. *spent*: what a program that is over, or a request that nothing will follow, left behind and nobody else has used;
2. whatever nobody said anything about, which without hints is everything: least recently used;
3. *favoured*: what belongs to the programs that the scheduler has seated and expects back;
4. *leased*: what a client pays to keep, while the lease lasts.

Nothing is searched for: a change concerns the leaves of one owner, or of one lease.
"""

from __future__ import annotations

from bough.kv.eviction import RankedEviction
from bough.kv.node import NOBODY, WIDTH, Node

SPENT, ORDINARY, FAVOURED, LEASED = range(4)


class ProgramEviction(RankedEviction):
    """Least recently used within four classes."""

    def __init__(self) -> None:
        super().__init__(lambda node: (self._class(node), node.stamp))
        self._leaves: dict[int, dict[Node, None]] = {}
        self._tokens: dict[int, int] = {}
        self._favoured: set[int] = set()
        self._over: set[int] = set()
        self.leased: dict[str, int] = {}
        """Tokens under at least one lease, by tenant; tenants without any are absent."""

    def _class(self, node: Node) -> int:
        if node.leases:
            return LEASED
        if node.owner in self._favoured:
            return FAVOURED
        return SPENT if node.spent or node.owner in self._over else ORDINARY

    # -- what the tree tells

    def grew(self, node: Node, old_end: int) -> None:
        self._count(node.owner, node.end - old_end)

    def shared(self, node: Node, before: int) -> None:
        self._count(before, -node.n_tokens)

    def shrank(self, node: Node, tail: bytes, evicted: bool) -> None:
        n = len(tail) // WIDTH
        self._count(node.owner, -n)
        if node.leases:
            self._count_leased(node, -n)

    def offer(self, node: Node) -> None:
        super().offer(node)
        if node.owner > NOBODY:
            self._leaves.setdefault(node.owner, {})[node] = None

    def withdraw(self, node: Node) -> None:
        super().withdraw(node)
        if node.owner > NOBODY:
            leaves = self._leaves[node.owner]
            del leaves[node]
            if not leaves:
                del self._leaves[node.owner]

    def _count(self, owner: int, n: int) -> None:
        if owner > NOBODY:
            left = self._tokens.get(owner, 0) + n
            if left:
                self._tokens[owner] = left
            else:
                del self._tokens[owner]
                self._over.discard(owner)

    def _count_leased(self, node: Node, n: int) -> None:
        left = self.leased.get(node.ns.tenant, 0) + n
        if left:
            self.leased[node.ns.tenant] = left
        else:
            self.leased.pop(node.ns.tenant, None)

    # -- what the scheduler tells

    def tokens(self, owner: int) -> int:
        """Tokens that only the program ``owner`` uses."""
        return self._tokens.get(owner, 0)

    def favour(self, owner: int, favoured: bool) -> None:
        """The scheduler expects ``owner`` back, or no longer does."""
        if favoured != (owner in self._favoured):
            (self._favoured.add if favoured else self._favoured.discard)(owner)
            self._refile(owner)

    def over(self, owner: int) -> None:
        """The program ``owner`` has ended."""
        self._favoured.discard(owner)
        if owner in self._tokens:
            self._over.add(owner)
            self._refile(owner)

    def spend(self, node: Node) -> None:
        """Nothing will follow what ends with ``node``: so much of its path as nobody else ever found is spent."""
        above: Node | None = node
        while above is not None and above.parent is not None and not above.hits:
            above.spent = True
            self._renew(above)
            above = above.parent

    def lease(self, node: Node, by: int) -> None:
        """One lease more (``by`` 1) or less (-1) on everything from the root to the end of ``node``."""
        above: Node | None = node
        while above is not None and above.parent is not None:
            above.leases += by
            if above.leases == (1 if by > 0 else 0):
                self._count_leased(above, by * above.n_tokens)
            self._renew(above)
            above = above.parent

    def _refile(self, owner: int) -> None:
        for node in list(self._leaves.get(owner, ())):
            self._renew(node)

    def _renew(self, node: Node) -> None:
        """What ``node`` is ranked by has changed."""
        if node.offered:
            self.withdraw(node)
            self.offer(node)
