"""Requests that are stopped by their names, so that their answers say what they had generated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from bough.lang.errors import BackendError

T = TypeVar("T")

ABORT_SECONDS = 5.0
"""How long a call that was cancelled waits to be told what it had generated."""
UNKNOWN_SECONDS = 0.02
"""A request that the server does not know may be on its way there; so soon is it aborted again."""


async def aborting(
    request: Coroutine[Any, Any, T], abort: Callable[[], Awaitable[bool]], told: Callable[[asyncio.Task[T]], None]
) -> T:
    """The answer to ``request``.

    When cancelled, ``abort()`` stops it on the server and says whether it was known there; ``told`` gets the request
    that has then been answered. No longer than is sensible is waited for that.
    """
    work = asyncio.ensure_future(request)
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError:
        if not work.cancelling():  # else the event loop is ending
            with suppress(BackendError, TimeoutError):
                await _abort(work, abort)
                told(work)
        raise
    finally:
        work.cancel()
    return work.result()


async def _abort(work: asyncio.Task[Any], abort: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(ABORT_SECONDS):
        while not work.done():
            known = await abort()
            await asyncio.wait({work}, timeout=None if known else UNKNOWN_SECONDS)
