"""Responses that are kept: in memory, for a while, in a bounded number of bytes."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bough.base.errors import NotFound
from bough.base.limits import Limits
from bough.server.errors import encode_json
from bough.server.responses.translate import Item

RUNNING = ("queued", "in_progress")


class EventLog:
    """The events of a background response, for readers that come and go."""

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self.bytes = 0
        self._over = False
        self._news = asyncio.Event()

    def add(self, events: list[bytes]) -> None:
        self._events += events
        self.bytes += sum(map(len, events))
        self._wake()

    def close(self) -> None:
        self._over = True
        self._wake()

    async def read(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events with sequence numbers above ``after``, as they come, to the last."""
        position = max(0, after + 1)
        while True:
            news = self._news
            if position < len(self._events):
                fresh = self._events[position:]
                position += len(fresh)
                yield b"".join(fresh)
            elif self._over:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


@dataclass(slots=True)
class Stored:
    """A response, the items that it answers (those of the responses before it included), and its background work."""

    response: dict[str, Any]
    tenant: str
    history: list[Item]
    own: list[Item]
    stored_at: float
    bytes: int = 0
    log: EventLog | None = None
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.response["status"] in RUNNING

    @property
    def conversation(self) -> list[Item]:
        """All items up to and with what was generated: what a next response continues."""
        return [*self.history, *self.own, *self.response["output"]]


@dataclass(slots=True)
class _Owned:
    """What is kept for one tenant, the oldest first."""

    stored: dict[str, Stored] = field(default_factory=dict)
    bytes: int = 0


class ResponseStore:
    """Keeps what clients may come back for. What is too old is forgotten; where there are too many bytes, the oldest
    that does not run of the tenant who has most."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._stored: dict[str, Stored] = {}
        self._owned: defaultdict[str, _Owned] = defaultdict(_Owned)
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def running(self, tenant: str) -> int:
        """Responses of ``tenant`` that run."""
        return sum(stored.running for stored in self._owned[tenant].stored.values()) if tenant in self._owned else 0

    def add(self, response: dict[str, Any], tenant: str, history: list[Item], own: list[Item]) -> Stored:
        stored = Stored(response, tenant, history, own, self._clock())
        self._stored[response["id"]] = self._owned[tenant].stored[response["id"]] = stored
        self.resize(stored)
        return stored

    def resize(self, stored: Stored) -> None:
        """Count ``stored`` anew, which has changed, and forget what is beyond the bounds."""
        if self._stored.get(stored.response["id"]) is not stored:
            return  # forgotten while it grew
        if not stored.running:
            _pack_logprobs(stored.response)
        before = stored.bytes
        stored.bytes = len(encode_json((stored.response, stored.history, stored.own)))
        stored.bytes += 0 if stored.log is None else stored.log.bytes
        self._bytes += stored.bytes - before
        self._owned[stored.tenant].bytes += stored.bytes - before
        self._sweep()

    def get(self, response_id: str, tenant: str) -> Stored:
        """Raises NotFound for what is not there, no longer there, or another tenant's."""
        self._sweep()
        stored = self._stored.get(response_id)
        if stored is None or stored.tenant != tenant:
            raise NotFound(f"Response with id '{response_id[:256]}' not found.")
        return stored

    def remove(self, stored: Stored) -> None:
        if self._stored.pop(stored.response["id"], None) is not None:
            self._bytes -= stored.bytes
            owned = self._owned[stored.tenant]
            owned.bytes -= stored.bytes
            del owned.stored[stored.response["id"]]
            if not owned.stored:
                del self._owned[stored.tenant]

    def _sweep(self) -> None:
        oldest = self._clock() - self._limits.responses_seconds
        for stored in list(self._stored.values()):
            if stored.stored_at > oldest:
                break
            if not stored.running:
                self.remove(stored)
        while self._bytes > self._limits.responses_bytes and (idle := self._idle()) is not None:
            self.remove(idle)

    def _idle(self) -> Stored | None:
        """The oldest that does not run, of the tenant for whom most bytes are kept and who has any."""
        for owned in sorted(self._owned.values(), key=lambda owned: -owned.bytes):
            for stored in owned.stored.values():
                if not stored.running:
                    return stored
        return None


def _pack_logprobs(response: dict[str, Any]) -> None:
    """Keep them as the JSON that they are sent as: as objects they are several times as large."""
    for item in response["output"]:
        for part in item.get("content") or ():
            if part.get("logprobs"):
                part["logprobs"] = msgspec.Raw(encode_json(part["logprobs"]))
