"""Requests to one server: JSON in, JSON or server-sent events out, thousands of calls at once."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import aiohttp
import msgspec

from bough.lang.errors import BackendError
from bough.lang.waiting import close_with

CONNECT_SECONDS = 30.0
CUT = "the stream ended before the answer was complete"
KEPT_SECONDS = 3.0
"""Idle connections are kept for less than servers commonly keep them, so that none is taken just when it ends."""


class HttpClient:
    """Requests to the server at ``base_url``, which may have a path and credentials. Belongs to one event loop.

    Its connections are closed by :meth:`close`, or when it is collected.

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
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
            url = url._replace(netloc=url.netloc.rpartition("@")[2])
        self._base = urlunsplit(url).rstrip("/")
        self._ssl = ssl.create_default_context(cafile=verify) if verify is not None else True
        self._session: aiohttp.ClientSession | None = None
        self._pid = 0
        self._inherited: aiohttp.ClientSession | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None

    async def request(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer: JSON where it is, text otherwise. Raises BackendError for every status but 200."""
        async with self._answer(method, path, body) as answer:
            return await _decoded(answer)

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The decoded ``data:`` lines of a POST's answer, up to ``[DONE]``. Leaving early closes the connection.

        Raises BackendError for an answer that ends without it.
        """
        async with self._answer("POST", path, body) as answer:
            if answer.status != 200:
                await _decoded(answer)
            buffer, done = b"", False
            async for piece in answer.content.iter_any():  # an event may be longer than any line that aiohttp reads
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                    done = done or data == b"[DONE]"
                    if data and not done:
                        yield msgspec.json.decode(data)
            if not done:
                raise BackendError(CUT)

    async def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        if self._session is not None and self._pid == os.getpid():
            assert self._finalizer is not None
            self._finalizer.detach()
            session, self._session = self._session, None
            await session.close()

    @contextlib.asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request from its status line on. What goes wrong with it is a BackendError."""
        if self._session is None or self._pid != os.getpid():
            # A forked child has connections of its own; to collect its parent's would close what the parent uses.
            self._pid, self._inherited = os.getpid(), self._session
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS, ssl=self._ssl),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
            self._finalizer = close_with(self, self._session.close, asyncio.get_running_loop())
        data, kind = (None, None) if body is None else (msgspec.json.encode(body), _JSON)
        try:
            async with self._session.request(method, self._base + path, data=data, headers=kind) as answer:
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise BackendError(f"no connection to {error.host}:{error.port}: {error.os_error or error}") from error
        except aiohttp.ClientError as error:
            raise BackendError(f"the answer broke off: {error}") from error
        except TimeoutError as error:
            raise BackendError(f"no connection to {self._base}: timeout") from error


_JSON = {"Content-Type": "application/json"}


async def _decoded(answer: aiohttp.ClientResponse) -> Any:
    data = await answer.read()
    try:
        content = msgspec.json.decode(data)
    except msgspec.DecodeError:
        content = data.decode("utf-8", "replace")
    if answer.status != 200:
        raise BackendError(content, answer.status, retry_after(answer.headers))
    return content


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer asks to wait before the next attempt; None where it does not say.

    ``Retry-After`` gives them, or a date; ``retry-after-ms``, which OpenAI's servers send beside it, is more exact.
    """
    with contextlib.suppress(KeyError, ValueError):
        return _finite(float(headers["retry-after-ms"]) / 1000)
    value = headers.get("retry-after")
    if value is None:
        return None
    with contextlib.suppress(ValueError):
        return _finite(float(value))
    with contextlib.suppress(ValueError):
        return _finite(parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError("no time")
    return max(0.0, seconds)
