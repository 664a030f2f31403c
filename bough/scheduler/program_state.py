"""One program as the ledger knows it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from bough.base.messages import Namespace
from bough.base.plan import Ints

if TYPE_CHECKING:
    from bough.scheduler.req import Req

AHEAD = 64
"""Continuations computed ahead that a program may have unused; the oldest is forgotten first."""

CALLS = 16
"""Requests that a program is expected to make yet, where it does not say and has not made many more."""


class Ahead:
    """Tokens of a namespace that were computed before anybody asked for them: ``start`` to ``end`` of ``ids``.

    Of what stands before them it keeps a digest only, since many continue one long text.
    """

    __slots__ = ("_before", "_ids", "_namespace", "end", "start")

    def __init__(self, namespace: Namespace, ids: Ints, start: int) -> None:
        self._namespace = namespace
        self._before = _digest(ids[:start])
        self._ids = ids[start:].copy()
        self.start = self.end = start

    def __len__(self) -> int:
        """Ids that are kept for it."""
        return len(self._ids)

    def found(self, req: Req, cached_len: int) -> int:
        """How many of them ``req``, which got ``cached_len`` tokens from the cache, has found there."""
        start, end = self.start, min(self.end, cached_len)
        if end <= start or req.request.namespace != self._namespace:
            return 0
        differ = np.flatnonzero(self._ids[: end - start] != req.ids[start:end])
        n = int(differ[0]) if len(differ) else end - start
        return n if n and _digest(req.ids[:start]) == self._before else 0


def _digest(ids: Ints) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False)
class ProgramState:
    """One program of one tenant.

    Attributes:
        key: tenant and id.
        number: the owner under which the cache knows it.
        order: its place among programs of equal rank; smaller is earlier.
        priority, deadline, budget: as the envelope says; the clock reading for the deadline.
        service: tokens computed and generated for it, the latter weighted by the memory that they held.
        held: tokens of its latest prompt, which is what it needs in the cache to go on.
        level: the least expected service goes first, by powers of two.
        to_come: requests that will follow the latest, as its envelope says; None where it does not.
        opened: clock reading of its first arrival.
        prompt, cached, generated, calls: tokens and requests so far, ``generated`` of those that have ended.
        spent: tokens generated under its budget so far; those of requests that began without one count from their end.
        reqs: its requests in the engine, by rid.
        since: clock reading from which on it waits: of its latest admission, or of the first request that waits.
        pause: mean seconds between its requests, None before the second.
        left: clock reading at which its last request ended; ``leaves`` is when its seat goes.
        node: the call that came last.
        seated, ended: it has a seat; its last request was announced.
        ahead: what was computed for it before it asked, and it has not found yet.
    """

    key: tuple[str, str]
    number: int
    order: int
    opened: float
    priority: int = 0
    deadline: float = float("inf")
    budget: int | None = None
    service: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    held: int = 0
    level: int = 0
    to_come: int | None = None
    spent: int = 0
    reqs: dict[str, Req] = field(default_factory=dict)
    calls: int = 0
    since: float = 0.0
    pause: float | None = None
    left: float = 0.0
    leaves: float = float("inf")
    node: str = ""
    seated: bool = False
    ended: bool = False
    ahead: list[Ahead] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Tokens generated so far, as a budget counts them."""
        if self.budget is not None:
            return max(self.spent, self.generated)
        return self.generated + sum(req.n_generated for req in self.reqs.values())

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller goes first among the programs of a tenant: priority, a deadline, then as :attr:`standing`."""
        return -self.priority, self.deadline, *self.standing

    @property
    def standing(self) -> tuple[int, int]:
        """Smaller goes first among those of all tenants: least expected service, then whoever came first."""
        return self.level, self.order

    @property
    def expected(self) -> int:
        """Tokens of service that are still to come: what a request of it has cost, times how many follow.

        Where nobody said how many, ``CALLS``, and behind very many a quarter of what there were. What a call costs
        differs by orders of magnitude between programs, and the calls before it tell; how many follow, they hardly do.
        """
        to_come = max(CALLS, self.calls // 4) if self.to_come is None else self.to_come + bool(self.reqs)
        return to_come * self.service // max(1, self.calls - len(self.reqs))


def before(one: ProgramState, other: ProgramState) -> bool:
    """Whether ``one`` goes before ``other``: by what they ask for within a tenant, else by what they have had."""
    if one.key[0] == other.key[0]:
        return one.rank < other.rank
    return one.standing < other.standing
