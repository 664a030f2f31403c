"""The id-level client of an engine: what every transport offers, and what all of them share."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from bough.base.errors import DeadlineExceeded, EngineError, InvalidRequest, Overloaded, Unavailable
from bough.base.messages import (
    PROTOCOL,
    Abort,
    Control,
    ControlOp,
    ControlReply,
    Finish,
    FromEngine,
    Hello,
    Output,
    Outputs,
    Prefetch,
    Request,
    Stats,
    ToEngine,
)
from bough.engine.stream import OutputStream


class EngineClient(Protocol):
    """Requests in, outputs out, whatever process the engine lives in.

    Belongs to one event loop; no method may be called from another thread.
    """

    hello: Hello | None
    stats: Stats | None
    on_stats: Callable[[Stats], None]
    """Called with every heartbeat; the step times in one are in no other."""

    @property
    def alive(self) -> bool:
        """Whether an engine has said hello and has not died since."""
        ...

    async def start(self) -> Hello:
        """Wait until an engine is ready. Raises what stopped it from becoming so, where that is known."""
        ...

    def submit(self, *requests: Request) -> OutputStream:
        """Hand over ``requests`` together; the stream ends after each of them has finished.

        Raises Unavailable without a live engine, Overloaded when too many sequences are in flight and
        InvalidRequest for a rid that is.
        """
        ...

    def prefetch(self, message: Prefetch) -> None:
        """Have something computed that nobody has asked for yet; lost where no engine lives."""
        ...

    def abort(self, rids: list[str]) -> None:
        """Stop these requests; each still ends with its one terminal output. Unknown ones are ignored."""
        ...

    async def control(self, op: ControlOp, **args: str) -> ControlReply:
        """Send an operator's command. Raises Unavailable when the engine is, or goes, away."""
        ...

    def stats_age(self) -> float:
        """Seconds since the last heartbeat; infinite before the first."""
        ...

    async def close(self) -> None:
        """End every stream and let go of the engine; one that lives in this process stops."""
        ...


def _ignore(stats: Stats) -> None:
    """Nobody follows the heartbeats."""


LATE_SECONDS = 2.0
"""After its timeout, for which a request waits for the engine to end it between two steps."""
CONTROL_SECONDS = 60.0
"""For which a command waits."""
NO_END = "the request ran past its timeout, and the engine did not end it"


class StreamClient:
    """The part of a client above its transport: streams, commands, heartbeats.

    The engine knows each request by a wire id that is never used twice, whatever its ``rid``: news of a
    request that was given up cannot reach a later one of the same rid, nor that of another client.
    Subclasses implement ``_post`` and call ``_dispatch`` for each message of the engine, on the event loop.
    """

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.stats: Stats | None = None
        self.on_stats: Callable[[Stats], None] = _ignore
        self._stats_at = -math.inf
        self._streams: dict[str, tuple[OutputStream, str]] = {}  # by wire id, with the rid
        self._overdue: dict[str, asyncio.TimerHandle] = {}  # by wire id, of requests with a timeout
        self._wire_ids: dict[str, str] = {}  # by rid
        self._wire_prefix = secrets.token_hex(16)
        self._numbers = itertools.count()
        self._controls: dict[int, asyncio.Future[ControlReply]] = {}
        self._control_ids = itertools.count(1)
        self._alive = False
        self._failure: BaseException | None = None
        self._settled = asyncio.Event()  # whether waiting for an engine has come to an end, good or bad

    def _post(self, message: ToEngine) -> bool:
        """Send ``message``; False where it cannot reach an engine now."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self._alive

    def stats_age(self) -> float:
        return time.monotonic() - self._stats_at

    def submit(self, *requests: Request) -> OutputStream:
        if self.hello is None or not self.alive:
            raise Unavailable("the engine is not running")
        limits = self.hello.limits
        if len(self._streams) + len(requests) > limits.queue_requests + limits.sequences:
            raise Overloaded("too many requests are in flight")
        for request in requests:
            if request.rid in self._wire_ids:
                raise InvalidRequest(f"a request with the id {request.rid!r} is in flight", param="rid")
        stream = OutputStream([r.rid for r in requests], limits, self._leave)
        for request in requests:
            wire_id = f"{self._wire_prefix}-{next(self._numbers)}"
            self._wire_ids[request.rid] = wire_id
            self._streams[wire_id] = stream, request.rid
            if request.timeout is not None:
                loop = asyncio.get_running_loop()
                self._overdue[wire_id] = loop.call_later(request.timeout + LATE_SECONDS, self._end_overdue, wire_id)
            if not self._post(msgspec.structs.replace(request, rid=wire_id)):
                self._leave(list(stream.unfinished))
                raise Unavailable("the engine cannot be reached")
        return stream

    def prefetch(self, message: Prefetch) -> None:
        self._post(message)

    def abort(self, rids: list[str]) -> None:
        known = [self._wire_ids[rid] for rid in rids if rid in self._wire_ids]
        if known:
            self._post(Abort(known))

    async def control(self, op: ControlOp, **args: str) -> ControlReply:
        if not self.alive:
            raise Unavailable("the engine is not running")
        command = Control(next(self._control_ids), op, args)
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._controls[command.id] = reply
        try:
            if not self._post(command):
                raise Unavailable("the engine cannot be reached")
            async with asyncio.timeout(CONTROL_SECONDS):
                return await reply
        except TimeoutError:
            raise Unavailable("the engine does not answer") from None
        finally:
            del self._controls[command.id]

    def _leave(self, rids: list[str]) -> None:
        """The consumer no longer wants these: forget them here and stop them there."""
        self.abort(rids)
        for rid in rids:
            self._forget(rid)

    def _forget(self, rid: str) -> None:
        if (wire_id := self._wire_ids.pop(rid, None)) is not None:
            del self._streams[wire_id]
            if (timer := self._overdue.pop(wire_id, None)) is not None:
                timer.cancel()

    def _end_overdue(self, wire_id: str) -> None:
        """The engine, whose task it is to end requests that run past their timeouts, does not."""
        stream, rid = self._streams[wire_id]
        finish = Finish("timeout", message=NO_END, status=DeadlineExceeded.status)
        stream.feed(stream.terminal(rid, finish), time.monotonic())
        self._leave([rid])

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            now = time.monotonic()
            for output in message.items:
                self._feed(output, now)
        elif isinstance(message, Stats):
            self.stats, self._stats_at = message, time.monotonic()
            self.on_stats(message)
        elif isinstance(message, Hello):
            self._greet(message)
        elif (reply := self._controls.get(message.id)) is not None and not reply.done():
            reply.set_result(message)

    def _feed(self, output: Output, now: float) -> None:
        # Outputs of streams that were closed here, or that an engine before this one served, end at this table.
        if output.rid not in self._streams:
            return
        stream, rid = self._streams[output.rid]
        stream.feed(msgspec.structs.replace(output, rid=rid), now)
        if rid not in stream.unfinished:
            if output.finish is None:  # the stream ended it, because nobody reads it or because tokens are missing
                self.abort([rid])
            self._forget(rid)

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._give_up(EngineError(f"the engine speaks protocol {hello.protocol}, this client {PROTOCOL}"))
            return
        # An engine that introduces itself knows nothing of what was submitted before.
        self._fail_all("the engine lost this request")
        self.hello = hello
        self._alive = True
        self._settled.set()

    async def _wait_for_hello(self) -> Hello:
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        assert self.hello is not None
        return self.hello

    def _lose(self, message: str) -> None:
        """The engine is gone: everything in flight ends now, and the next one is awaited."""
        self._alive = False
        self._settled.clear()
        self._fail_all(message)

    def _give_up(self, failure: BaseException) -> None:
        """There will be no engine any more."""
        self._lose(str(failure))
        self._failure = failure
        self._settled.set()

    def _fail_all(self, message: str) -> None:
        now = time.monotonic()
        finish = Finish("error", message=message, status=Unavailable.status)
        streams = list(self._streams.values())
        for rid in [*self._wire_ids]:
            self._forget(rid)
        for stream, rid in streams:
            stream.feed(stream.terminal(rid, finish), now)
        for reply in self._controls.values():
            if not reply.done():
                reply.set_exception(Unavailable(message))
