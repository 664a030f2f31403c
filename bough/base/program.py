"""The envelope: what a client tells the engine about the program that a request belongs to.

A program is many requests that one task makes: the turns of an agent, the branches of a search, the questions about
one document. Every field is a hint or a wish; an answer never depends on them, except that a budget can cut it short
and an ended program takes no more requests. ``docs/program_protocol.md`` is the open protocol.
"""

from __future__ import annotations

from typing import Literal

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
        priority: larger programs first; the largest that any request of the program named.
        deadline: seconds from this request's arrival by which the program should be done.
        budget: tokens that the program may generate from its first request on; the smallest that was named.
        end: this is the program's last request.
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
