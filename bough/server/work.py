"""The life of one request that does work: read, parse, run, answer or stream, and stop when the client goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bough.base.errors import BoughError, EngineError, Unavailable
from bough.engine.async_engine import AsyncEngine
from bough.server.auth import Principal
from bough.server.body import ClientGone, check_headers, decode_body, read_body
from bough.server.dialect import DONE, OPENAI, Dialect
from bough.server.errors import Aborted, retry_headers
from bough.server.programs import program_headers, programs_named
from bough.server.service import Flight, Service

T = TypeVar("T")
logger = logging.getLogger("bough.server")

JSON = b"application/json"
LARGE_BODY_BYTES = 1 << 16
"""Larger bodies, which take a millisecond and more to parse, are taken one at a time; between two of them, what has
come for others is dealt with."""
LOGGED_BYTES = 1 << 16
"""How much of a body is logged where bodies are."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a handler knows about its request.

    Attributes:
        engine: as the tenant may use it.
        started: in the clock of ``time.perf_counter``.
        path, query: parameters of the URL.
        program: the fields of the program envelope that came as headers.
    """

    service: Service
    engine: AsyncEngine
    flight: Flight
    request_id: str
    started: float
    principal: Principal
    path: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    program: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Events:
    """A stream that ends in another way than with ``[DONE]``."""

    pieces: AsyncGenerator[bytes, None]
    end: bytes = b""


Answer = bytes | AsyncGenerator[bytes, None] | Events
"""A complete JSON body, or server-sent events (without the final ``[DONE]``)."""

Handler = Callable[[Call, T], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """A kind of work, apart from how it is asked for."""

    decoder: msgspec.json.Decoder[T]
    handler: Handler[T]


class Work(Response, Generic[T]):
    """Runs ``handler`` on the parsed body and sends what it answers.

    A stream's headers are sent with its first piece, so an error before that has its own HTTP status; a later
    one is an event of the stream. When the client disconnects, the handler is cancelled, which closes the
    engine's stream and thereby aborts its sequences.
    """

    def __init__(
        self, service: Service, decoder: msgspec.json.Decoder[T], handler: Handler[T], dialect: Dialect = OPENAI
    ) -> None:
        self.service = service
        self.decoder = decoder
        self.handler = handler
        self.dialect = dialect
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A task of its own: every token resumes it, and would resume each layer of the framework above it as well.
        await asyncio.create_task(self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, state = self.service, scope["state"]
        request_id, principal = state["request_id"], state["principal"]
        started = time.perf_counter()
        exchange = _Exchange(send, state["send_body"], self.dialect)
        abort_connection = scope.get("extensions", {}).get("bough.abort", {}).get("call")
        try:
            check_headers(scope["headers"], service.limits)
            with service.flight(request_id, abort_connection, principal.tenant) as flight:
                exchange.flight = flight
                engine = service.ready_engine().for_tenant(principal.tenant)
                call = Call(
                    service, engine, flight, request_id, started, principal, scope.get("path_params", {}),
                    QueryParams(scope["query_string"]), program_headers(scope["headers"]),
                )  # fmt: skip
                body = await read_body(receive, service.limits)
                if service.config.serve.log_requests == "full":
                    logger.info("request %s: %s", request_id, body[:LOGGED_BYTES].decode("utf-8", "replace"))
                if len(body) > LARGE_BODY_BYTES:
                    async with service.large_body:
                        await asyncio.sleep(0)
                parsed = decode_body(self.decoder, body, service.limits)
                flight.programs = programs_named(call.program, getattr(parsed, "program", None))
                await self._answer(call, parsed, receive, exchange)
        except ClientGone:
            service.metrics.disconnected.inc()
            state["gone"] = True
        except BoughError as error:
            await exchange.fail(_as_seen(error, service))
        except Exception:
            logger.exception("request %s failed", request_id)
            await exchange.fail(EngineError("the server failed while it handled this request"))

    async def _answer(self, call: Call, body: T, receive: Receive, exchange: _Exchange) -> None:
        """Run the handler while the connection is watched. Raises ClientGone when it closes first."""
        main = asyncio.current_task()
        assert main is not None
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            if not exchange.finished:
                gone = True
                main.cancel()

        watcher = asyncio.create_task(watch())
        try:
            answer = await self.handler(call, body)
            if isinstance(answer, bytes):
                await exchange.reply(200, answer)
            elif isinstance(answer, Events):
                await exchange.stream(answer.pieces, answer.end)
            else:
                await exchange.stream(answer, DONE)
        except asyncio.CancelledError:
            if not gone:
                raise
            main.uncancel()
            raise ClientGone from None
        finally:
            watcher.cancel()


class _Exchange:
    """The response side of one request. ``send`` is for its head, ``send_body`` for all behind it."""

    def __init__(self, send: Send, send_body: Send, dialect: Dialect) -> None:
        self._send = send
        self._send_body = send_body
        self._dialect = dialect
        self._streaming = False
        self.finished = False
        self.flight: Flight | None = None

    async def reply(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        head = [(b"content-type", JSON), (b"content-length", str(len(body)).encode()), *(headers or ())]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        self.finished = True
        await self._write(body, more=False)

    async def stream(self, pieces: AsyncGenerator[bytes, None], end: bytes) -> None:
        async with aclosing(pieces):
            async for piece in pieces:
                if not self._streaming:
                    self._streaming = True
                    kind = (b"content-type", self._dialect.streams)
                    head = [kind, (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
                    await self._send({"type": "http.response.start", "status": 200, "headers": head})
                await self._write(piece, more=True)
        self.finished = True
        await self._write(end, more=False)

    async def fail(self, error: BoughError) -> None:
        """Answer with ``error``: as the response, or as the last event of a stream that has begun."""
        if self._streaming:
            self.finished = True
            await self._write(self._dialect.last_error(error), more=False)
        elif not self.finished:
            headers = retry_headers(error)
            # The rest of a body that was refused is not worth reading.
            if error.status in (408, 413, 415):
                headers.append((b"connection", b"close"))
            await self.reply(error.status, self._dialect.error(error), headers)

    async def _write(self, body: bytes, more: bool) -> None:
        flight = self.flight
        if flight is None:
            await self._send_body({"type": "http.response.body", "body": body, "more_body": more})
            return
        flight.blocked_since = time.monotonic()
        await self._send_body({"type": "http.response.body", "body": body, "more_body": more})
        flight.blocked_since = None


def _as_seen(error: BoughError, service: Service) -> BoughError:
    """``error`` as the client should see it: an end by a shutdown says so."""
    if isinstance(error, Aborted) and service.draining:
        return Unavailable("the server shut down before this request was finished")
    return error
