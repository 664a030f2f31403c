"""uvicorn's HTTP/1.1 protocol with bounds on the head of a request: its size, its headers, its time.

uvicorn leaves all three open. A connection that sends its head too slowly is closed; a head that is too
large is answered with 431; what is not HTTP is answered with 400 in the shape of all our errors.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bough.base.errors import BoughError, InvalidRequest
from bough.base.limits import Limits
from bough.server.errors import HeadersTooLarge, error_body


class BoundedProtocol(HttpToolsProtocol):
    """One connection. ``limits`` is set by :func:`bounded_protocol`."""

    limits: Limits

    def __init__(
        self,
        config: UvicornConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._in_head = True
        self._head_bytes = 0
        self._head_count = 0
        self._received = 0
        self._piece = 0
        self._between = True
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        # With pipelining, the request that runs is not the one that arrived last, which is all that uvicorn tells.
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        # Where a message begins within the data, what came before it in the same piece is not its head.
        self._piece = len(data) if self._between else 0
        self._received += len(data)
        super().data_received(data)
        # A header that never ends reaches no callback; its bytes are counted here.
        if self._in_head and self._received > self.limits.header_bytes and not self._refused:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {"bough.abort": {"call": self.transport.abort}}
        self._in_head = True
        self._head_bytes = self._head_count = 0
        self._received, self._between = self._piece, False
        self._arm()

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        if self._head_bytes <= self.limits.header_bytes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        self._head_count += 1
        if self._head_bytes <= self.limits.header_bytes and self._head_count <= self.limits.header_count:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._disarm()
        if self._head_bytes > self.limits.header_bytes or self._head_count > self.limits.header_count:
            self._refuse(self._too_large())
            raise ConnectionAbortedError  # makes the parser stop; the answer is on its way
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._between = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(InvalidRequest(msg))

    def _too_large(self) -> HeadersTooLarge:
        return HeadersTooLarge(
            f"the request head may have {self.limits.header_bytes} bytes and {self.limits.header_count} headers"
        )

    def _refuse(self, error: BoughError) -> None:
        self._refused = True
        self._disarm()
        body = error_body(error)
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()

    def _arm(self) -> None:
        self._disarm()
        self._head_timer = self.loop.call_later(self.limits.read_seconds, self._head_expired)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_expired(self) -> None:
        self._head_timer = None
        self._refused = True
        self.transport.close()


def bounded_protocol(limits: Limits) -> type[BoundedProtocol]:
    """The protocol class for uvicorn's ``http`` option."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
