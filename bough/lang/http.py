"""A small HTTP/1.1 client for one server: JSON in, JSON or server-sent events out, thousands of calls at once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import httptools
import msgspec

from bough.lang.errors import BackendError

CONNECT_SECONDS = 30.0
IDLE_CONNECTIONS = 256
"""More connections than these are not kept when nothing uses them."""

_HIGH_WATER = 1 << 20


class _Answer(asyncio.Protocol):
    """One connection, and the answer that arrives on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.begin()

    def begin(self) -> None:
        """Be ready for the next answer."""
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: deque[bytes] = deque()
        self.held = 0
        self.complete = False
        self.error: BaseException | None = None
        self.reusable = False
        self.news: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by class

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(BackendError(f"the server does not speak HTTP: {error}"))
        self.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if (
            self.status
            and not self.complete
            and "content-length" not in self.headers
            and "chunked" not in (self.headers.get("transfer-encoding", ""))
        ):
            self.complete = True  # a body that only the end of the connection ends
        self.wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self.held += len(body)
        if self.held > _HIGH_WATER and self.transport is not None:
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status >= 200:  # 100 Continue comes before the answer
            self.complete = True
            self.reusable = bool(self.parser.should_keep_alive())

    def fail(self, error: BaseException) -> None:
        self.error = error
        if self.transport is not None:
            self.transport.abort()

    def wake(self) -> None:
        if self.news is not None and not self.news.done():
            self.news.set_result(None)

    async def more(self) -> None:
        """Wait until something happened. Raises BackendError where the connection ends too early."""
        if self.error is not None:
            raise self.error
        if self.complete:
            return
        if self.closed:
            raise BackendError("the server closed the connection before the answer was complete")
        self.news = asyncio.get_running_loop().create_future()
        await self.news

    def take(self) -> bytes:
        data = b"".join(self.pieces)
        self.pieces.clear()
        if self.held > _HIGH_WATER and self.transport is not None and not self.closed:
            self.transport.resume_reading()
        self.held = 0
        return data


class HttpClient:
    """Requests to the server at ``base_url``, which may have a path and credentials. Belongs to one event loop.

    Args:
        api_key: sent as a bearer token.
        verify: file of certificates to trust, for https; None trusts the system's.
        headers: sent with every request.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        verify: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} is not an http or https address")
        self._ssl = ssl.create_default_context(cafile=verify) if url.scheme == "https" else None
        self._host, self._port = url.hostname, url.port or (443 if self._ssl else 80)
        self._path = url.path.rstrip("/")
        shown = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
        lines = {"Host": shown if url.port is None else f"{shown}:{url.port}", "Accept": "*/*", **(headers or {})}
        if api_key is not None:
            lines["Authorization"] = f"Bearer {api_key}"
        elif url.username:
            pair = f"{unquote(url.username)}:{unquote(url.password or '')}"
            lines["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Answer] = []

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer: JSON where it is, text otherwise. Raises BackendError for every status but 200."""
        async with self._answer(method, path, body) as answer:
            return await _decoded(answer)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The decoded ``data:`` lines of a POST's answer, up to ``[DONE]``. Leaving early closes the connection."""
        async with self._answer("POST", path, body) as answer:
            if answer.status != 200:
                await _decoded(answer)
            buffer = b""
            while True:
                buffer += answer.take()
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    if data == b"[DONE]":
                        while not answer.complete:  # so that the connection can be used again
                            await answer.more()
                        return
                    if data:
                        yield msgspec.json.decode(data)
                if answer.complete and not answer.pieces:
                    return
                if not answer.pieces:
                    await answer.more()

    def close(self) -> None:
        """Close the connections that nothing uses."""
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                connection.transport.close()

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any) -> AsyncIterator[_Answer]:
        """The answer to a request from its status line on."""
        content = b"" if body is None else msgspec.json.encode(body)
        kind = "Content-Type: application/json\r\n" if body is not None else ""
        head = (
            f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{kind}Content-Length: {len(content)}\r\n\r\n"
        ).encode()
        answer = await self._sent(head + content)
        try:
            yield answer
        finally:
            keep = answer.complete and answer.reusable and not answer.closed and len(self._idle) < IDLE_CONNECTIONS
            if keep:
                self._idle.append(answer)
            elif answer.transport is not None:
                answer.transport.abort()

    async def _sent(self, data: bytes) -> _Answer:
        """The connection on which the answer to ``data`` has begun."""
        while True:
            fresh = not self._idle
            connection = await self._connect() if fresh else self._idle.pop()
            if connection.closed:
                continue
            connection.begin()
            assert connection.transport is not None
            connection.transport.write(data)
            try:
                while not connection.status:
                    await connection.more()
                return connection
            except BackendError:
                connection.transport.abort()
                # The server may have closed an idle connection just when it was taken: it saw nothing of this.
                if fresh or connection.status:
                    raise
            except BaseException:
                connection.transport.abort()
                raise

    async def _connect(self) -> _Answer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(_Answer, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            raise BackendError(f"no connection to {self._host}:{self._port}: {error or 'timeout'}") from error
        return connection


async def _decoded(answer: _Answer) -> Any:
    while not answer.complete:
        await answer.more()
    data = answer.take()
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError:
        content = data.decode("utf-8", "replace")
    if answer.status != 200:
        raise BackendError(content, answer.status, _seconds(answer.headers.get("retry-after")))
    return content


def _seconds(value: str | None) -> float | None:
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None
