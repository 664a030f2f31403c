"""The event loop that programs run on, and events that both threads and coroutines wait for."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def default_loop() -> asyncio.AbstractEventLoop:
    """The loop of all backends that bring none; it runs on one daemon thread of this process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = uvloop.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="bough-lang", daemon=True).start()
        return _loop


def _forget_loop() -> None:
    # The thread does not follow into a forked child.
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller is code of ``loop``, which must not wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def wait_for(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run ``work`` on ``loop`` and wait for it in this thread; interrupting the wait cancels it."""
    if runs_here(loop):
        work.close()
        raise RuntimeError("the event loop of the programs cannot wait for itself: await this instead")
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class Signal:
    """Set once, from any thread; calls back, wakes threads and resumes coroutines of any loop."""

    __slots__ = ("_calls", "_set")

    def __init__(self) -> None:
        self._set = False
        self._calls: list[Callable[[], object]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with _lock:
            self._set = True
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def then(self, call: Callable[[], object]) -> None:
        """Call ``call`` when this is set, at once where it is."""
        with _lock:
            if not self._set:
                self._calls.append(call)
                return
        call()

    def wait(self, timeout: float | None = None) -> bool:
        """Block this thread; False after ``timeout`` seconds."""
        if self._set:
            return True
        gate = threading.Event()
        self.then(gate.set)
        return gate.wait(timeout)

    async def reached(self) -> None:
        if self._set:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self.then(lambda: _resume(loop, future))
        await future


def _resume(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    if not loop.is_closed():
        loop.call_soon_threadsafe(resolve)
