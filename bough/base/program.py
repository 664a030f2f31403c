"""The envelope: what a client tells the engine about the program that a request belongs to.

A program is many requests that one task makes: the turns of an agent, the branches of a search, the questions about
one document. Every field is a hint or a wish; an answer never depends on them, except that a budget can cut it short.
``docs/program_protocol.md`` is the open protocol.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of one request in its program.

    Attributes:
        id: requests of one program share it; programs of different tenants never meet.
        node: name of this call in the program.
        parent: the node after which it comes.
        next_uses: how many later requests will begin with this request's prompt; 0: none will, None: unknown.
        next_in: seconds until the first of them.
        fork: requests of one program with the same fork are siblings and are admitted together.
        width: how many siblings carry that fork.
        pause: expected seconds between this answer and the program's next request, such as a tool call takes.
        priority: larger programs of a tenant first; the largest that any request of the program named.
        deadline: seconds from this request's arrival by which the program should be done.
        budget: tokens that the program may generate from its first request on, whichever names it; the smallest
            that was named.
        end: this is the program's last request.
        after: what the program will append to the answer, as text or as ids: computed ahead while nobody else wants
            the device. Another continuation costs nothing.
    """

    id: str
    node: str = ""
    parent: str = ""
    next_uses: int | None = None
    next_in: float | None = None
    fork: str = ""
    width: int = 1
    pause: float | None = None
    priority: int = 0
    deadline: float | None = None
    budget: int | None = None
    end: bool = False
    after: str | tuple[int, ...] = ""


class Lease(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A wish to keep the KV of a prompt's first ``upto`` tokens (None: of all of it) for ``ttl`` seconds."""

    ttl: float
    upto: int | None = None


LeaseAnswer = Literal["granted", "clipped", "denied"]


class Grant(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine granted a request; sent with its last output.

    Attributes:
        id: the program's, as the client named it; empty for a request without one.
        generated: tokens that the program has generated so far.
        budget: what is left of its budget, None without one.
        seated: the program is among those whose KV is kept between their requests.
        lease: what became of the lease that was asked for; None where none was.
        lease_tokens, lease_seconds: how much is kept, and for how long.
    """

    id: str = ""
    generated: int = 0
    budget: int | None = None
    seated: bool = False
    lease: LeaseAnswer | None = None
    lease_tokens: int = 0
    lease_seconds: float = 0.0

    def shown(self) -> dict[str, Any]:
        """What an answer says of it: the fields of the program, and ``lease`` where one was asked for."""
        shown: dict[str, Any] = {}
        if self.id:
            shown = {"id": self.id, "generated": self.generated, "budget": self.budget, "seated": self.seated}
        if self.lease is not None:
            shown["lease"] = {"answer": self.lease, "tokens": self.lease_tokens, "seconds": self.lease_seconds}
        return shown


class ProgramInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine knows of one program. Times are seconds.

    Attributes:
        id: as its client named it.
        node: the call that came last.
        age: since its first request; ``idle`` since its last one ended, None while one is in the engine.
        calls: its requests so far, of which ``running`` have a row and ``waiting`` do not.
        prompt_tokens, cached_tokens: of those that were admitted; how many of them came from the cache.
        generated_tokens: so far.
        kept_tokens: in the cache that nobody else uses; counted only under the eviction policy ``program``.
        service: tokens computed and generated for it, the latter weighted by the memory that they held.
        budget, deadline: what is left of them; None without.
        pause: from its latest request to the next one as that said, else the mean so far; None before the second.
        seated: it is among those whose KV is kept between their requests.
    """

    id: str
    node: str
    age: float
    idle: float | None
    calls: int
    running: int
    waiting: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    kept_tokens: int
    service: int
    budget: int | None
    deadline: float | None
    pause: float | None
    priority: int
    seated: bool


class ProgramStats(msgspec.Struct, frozen=True, kw_only=True):
    """Programs and leases in the engine's heartbeat; counters never fall.

    ``prefetched_tokens`` were computed ahead, of which later requests found ``used_tokens``.
    ``completions`` are the seconds from first request to end of the programs that ended since the previous heartbeat.
    """

    known: int = 0
    seated: int = 0
    opened: int = 0
    ended: int = 0
    forgotten: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    leased_tokens: int = 0
    granted: int = 0
    clipped: int = 0
    denied: int = 0
    prefetched_tokens: int = 0
    used_tokens: int = 0
    completions: list[float] = []
