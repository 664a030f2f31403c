"""One run of a program: its identity, what it may use, and a record of its calls."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bough.lang.errors import Cancelled, LimitExceeded
from bough.lang.habits import Habits
from bough.lang.limits import Limits, Retry

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


EARLY = 0.005
"""Seconds by which the timer of an event loop may go off too early."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a program's source."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"


@dataclass(slots=True)
class Call:
    """One call of the model or of a tool.

    Attributes:
        node: name of the call in its program; ``parent`` is the call that it comes after, empty for the first.
        kind: generate, select, prefill, lease or tool.
        name: variable that the result goes to.
        line: where the program asked for it.
        started: seconds from the start of the program; ``seconds`` is how long it took.
        prompt_tokens, cached_tokens, generated_tokens: as the backend counts them; 0 where it does not.
        wasted_tokens: generated ones that nobody uses: rejected answers, siblings that lost.
        attempts: how often it was sent.
        error: what it failed with.
        lease: what the engine answered to the wish for one: ``answer``, ``tokens`` and ``seconds``.
    """

    node: str
    parent: str
    kind: str
    name: str | None
    line: Line | None
    started: float
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    attempts: int = 0
    error: str = ""
    lease: dict[str, Any] | None = None
    under_way: int = 0
    """Tokens generated so far, for calls that may be stopped, as far as they are seen coming."""

    def follow(self, meta: dict[str, Any] | None, shown: str = "") -> None:
        """Note what ``meta`` says was used so far by a call that goes on.

        Where it does not say, ``shown``, a piece of a stream, is at least one token.
        """
        meta = meta or {}
        self.prompt_tokens = int(meta.get("prompt_tokens") or self.prompt_tokens)
        self.cached_tokens = int(meta.get("cached_tokens") or self.cached_tokens)
        self.under_way = int(meta.get("completion_tokens") or self.under_way + bool(shown))
        self._note_lease(meta)

    def _note_lease(self, meta: dict[str, Any]) -> None:
        self.lease = (meta.get("program") or {}).get("lease", self.lease)

    def settle(self) -> int:
        """The call that was followed is over; the number of tokens that it generated."""
        generated, self.under_way = self.under_way, 0
        self.generated_tokens += generated
        return generated

    def waste(self) -> int:
        """What was followed came to nothing; the number of tokens that it generated."""
        generated = self.settle()
        self.wasted_tokens += generated
        return generated

    def count(self, meta: dict[str, Any] | None) -> int:
        """Add what ``meta``, of one sequence, says was used; the number of generated tokens."""
        meta = meta or {}
        generated = int(meta.get("completion_tokens") or 0)
        self.under_way = 0
        self.prompt_tokens += int(meta.get("prompt_tokens") or 0)
        self.cached_tokens += int(meta.get("cached_tokens") or 0)
        self.generated_tokens += generated
        self._note_lease(meta)
        return generated


@dataclass(eq=False)
class Program:
    """What all states of one run share. Belongs to no thread."""

    name: str
    limits: Limits = Limits()
    retry: Retry = Retry()
    habits: Habits = field(default_factory=Habits)
    priority: int = 0
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    calls: list[Call] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    tokens: int = 0
    cancelled: str | None = None
    members: weakref.WeakSet[StreamExecutor] = field(default_factory=weakref.WeakSet)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _spent: int = 0
    _reserved: int = 0
    _waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)
    _ended: bool = False
    _unfinished: weakref.ref[StreamExecutor] | None = None
    """A state that was not finished when last seen."""

    def begin(self, kind: str, name: str | None, line: Line | None, parent: str) -> Call:
        """Record the start of a call. Raises Cancelled or LimitExceeded where the program may not make it."""
        if self.cancelled is not None:
            raise Cancelled(f"the program {self.name} was cancelled: {self.cancelled}")
        with self._lock:
            if kind not in ("tool", "prefill", "lease"):
                self._spent += 1
                if self.limits.calls is not None and self._spent > self.limits.calls:
                    raise LimitExceeded(f"the program {self.name} may make {self.limits.calls} calls and made them")
            call = Call(f"n{len(self.calls)}", parent, kind, name, line, time.monotonic() - self.started)
            self.calls.append(call)
            self._ended = False
        return call

    def tokens_left(self) -> int | None:
        """Tokens that may still be generated, at least 1. Raises LimitExceeded where there are none."""
        if self.limits.tokens is None:
            return None
        left = self.limits.tokens - self.tokens
        if left <= 0:
            raise LimitExceeded(f"the program {self.name} may generate {self.limits.tokens} tokens and did")
        return left

    async def reserve(self, tokens: int, least: int) -> int:
        """As many of ``tokens`` as no other call may generate, at least ``least``; :meth:`give_back` ends it.

        Waits while calls under way hold all that is left. Raises LimitExceeded where nothing is.
        """
        while (left := self.tokens_left()) is not None:
            seconds = self.seconds_left()
            with self._lock:
                free = left - self._reserved
                if free >= least or not self._reserved:
                    tokens = min(tokens, max(free, least))
                    self._reserved += tokens
                    break
                loop = asyncio.get_running_loop()
                waiter = loop.create_future()
                self._waiters.append((loop, waiter))
            with suppress(TimeoutError):
                async with remaining(seconds, None):
                    await waiter
        return tokens

    def give_back(self, tokens: int) -> None:
        """A call that had reserved ``tokens`` is over, and what it generated is counted."""
        if self.limits.tokens is None:
            return
        with self._lock:
            self._reserved -= tokens
            waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            loop.call_soon_threadsafe(_wake, waiter)

    def seconds_left(self) -> float | None:
        """Seconds until the program's time is over. Raises LimitExceeded when it is."""
        if self.limits.seconds is None:
            return None
        left = self.limits.seconds - (time.monotonic() - self.started)
        if left <= EARLY:
            raise LimitExceeded(f"the program {self.name} may take {self.limits.seconds:g} s and took them")
        return left

    def spend(self, tokens: int) -> None:
        with self._lock:
            self.tokens += tokens

    def cancel(self, reason: str) -> None:
        """Stop all calls of the program and let none begin. Idempotent; may be called from any thread."""
        if self.cancelled is None:
            self.cancelled = reason
            for member in list(self.members):
                member.cancel(reason)

    def add(self, member: StreamExecutor) -> None:
        """``member`` is a state of the program."""
        self.members.add(member)
        self._unfinished = self._unfinished or weakref.ref(member)

    def at_rest(self) -> bool:
        """Whether no state of the program has anything left to do."""
        # Thousands of branches ask, each when it ends, so they do not all look at all.
        found = None if self._unfinished is None else self._unfinished()
        if found is None or found.is_finished:
            found = next((member for member in list(self.members) if not member.is_finished), None)
            self._unfinished = None if found is None else weakref.ref(found)
        return found is None

    def end(self) -> bool:
        """True for the first who finds the program at rest since its last call."""
        with self._lock:
            first = not self._ended
            self._ended = True
        return first


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def remaining(seconds: float | None, timeout: float | None) -> asyncio.Timeout:
    """The shorter of two spans, of which either may be missing, as a timeout to enter."""
    spans = [s for s in (seconds, timeout) if s is not None]
    return asyncio.timeout(min(spans) if spans else None)
