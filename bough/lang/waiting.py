"""The event loop that programs run on, and events that both threads and coroutines wait for."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, cast

import uvloop

T = TypeVar("T")

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_loop: _Loop | None = None

EXIT_SECONDS = 5.0
"""How long the end of the interpreter waits for connections to be closed."""


class _Loop:
    """An event loop on a daemon thread of its own, ended with the interpreter."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bough-lang", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            serving = runner.get_loop().create_task(self._serve())
            while not serving.done():
                try:
                    self.loop.run_until_complete(serving)
                except (SystemExit, KeyboardInterrupt) as error:  # of a task that a program made: the others go on
                    logger.error("a task on the event loop of the programs raised %r", error)

    async def _serve(self) -> None:
        await self._over.wait()
        await _close_all(self.loop)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(EXIT_SECONDS)


def default_loop() -> asyncio.AbstractEventLoop:
    """The loop of all backends that bring none; it runs on one daemon thread of this process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = _Loop()
        return _loop.loop


def _forget_loop() -> None:
    # The thread does not follow into a forked child.
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


def _end_loop() -> None:
    if _loop is not None:
        _loop.end()


os.register_at_fork(after_in_child=_forget_loop)
# The first finalizer registers an exit of its own, after which none does anything: it has to come after this one.
weakref.finalize(_Loop, int).detach()
atexit.register(_end_loop)


_finalizers: list[weakref.finalize[..., Any]] = []
_working: set[asyncio.Future[Any]] = set()


def close_with(
    owner: object, close: Callable[[], Awaitable[Any]], loop: asyncio.AbstractEventLoop
) -> weakref.finalize[..., Any]:
    """Run ``close`` on ``loop`` when ``owner`` is collected, the returned finalizer is called, or the interpreter ends.

    ``close`` must not refer to ``owner``. A loop that has ended by then closes nothing.
    """
    finalizer = weakref.finalize(owner, _close_soon, close, loop)
    finalizer.atexit = False  # the loop sees to it when it ends
    with _lock:
        _finalizers[:] = [*(f for f in _finalizers if f.alive), finalizer]
    return finalizer


class Connection:
    """A client of a server, on the default loop. A forked child, which must not use its parent's, makes its own.

    Its connections are closed by :meth:`close`, or when this is collected.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """``make`` gives a client whose ``close`` is a coroutine function."""
        self._make = make
        self._inherited: Any = None
        self._connect()

    @property
    def client(self) -> Any:
        if self._pid != os.getpid():
            self._inherited = self._client  # kept: to collect it would close what the parent uses
            self._connect()
        return self._client

    def close(self) -> None:
        self._finalizer()

    def _connect(self) -> None:
        self._pid, self._client = os.getpid(), self._make()
        self._finalizer = close_with(self, self._client.close, default_loop())


def in_background(work: Callable[[], Awaitable[Any]], loop: asyncio.AbstractEventLoop) -> None:
    """Run ``work`` on ``loop``, from any thread; the end of the interpreter waits for it."""
    if loop.is_running():
        loop.call_soon_threadsafe(_begin, work)


def _close_soon(close: Callable[[], Awaitable[Any]], loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_running():
        loop.call_soon_threadsafe(_begin_closing, close)


def _begin_closing(close: Callable[[], Awaitable[Any]]) -> None:
    earlier = [task for task in _working if task.get_loop() is asyncio.get_running_loop()]

    async def closing() -> None:
        # What was begun before, such as telling a server of an end, uses what is closed.
        await asyncio.gather(*earlier, return_exceptions=True)
        await close()

    _begin(closing)


def _begin(work: Callable[[], Awaitable[Any]]) -> None:
    task = asyncio.ensure_future(work())
    _working.add(task)
    task.add_done_callback(_working.discard)


async def _close_all(loop: asyncio.AbstractEventLoop) -> None:
    """Close what is still open on ``loop``, which runs this, when what is under way is done."""
    await settled(loop)
    for finalizer in _finalizers:
        if (found := finalizer.peek()) is not None and found[2][1] is loop:
            finalizer.detach()
            _begin_closing(found[2][0])
    await settled(loop)


async def settled(loop: asyncio.AbstractEventLoop) -> None:
    """Wait on ``loop`` for what runs in its background: connections that are closed, servers that are told of ends."""
    await asyncio.sleep(0)  # what was asked for begins
    while working := [task for task in _working if task.get_loop() is loop]:
        await asyncio.gather(*working, return_exceptions=True)
        await asyncio.sleep(0)  # and what follows from it


def runs_here(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the caller is code of ``loop``, which must not wait for it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def refuse_waiting(loop: asyncio.AbstractEventLoop, instead: str) -> None:
    """Raises RuntimeError, which says what to use ``instead``, where the caller is code of ``loop``."""
    if runs_here(loop):
        raise RuntimeError(f"this would wait for the event loop that it runs on: use {instead} instead")


def wait_for(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop, instead: str = "`await`") -> T:
    """Run ``work`` on ``loop`` and wait for it in this thread; interrupting the wait cancels it.

    Whatever it raises is raised here, and not on ``loop``, which SystemExit would end. See :func:`refuse_waiting`.
    """
    try:
        refuse_waiting(loop, instead)
    except RuntimeError:
        work.close()
        raise
    future = asyncio.run_coroutine_threadsafe(_outcome(work), loop)
    try:
        result, error = future.result()
    except BaseException:
        future.cancel()
        raise
    if error is not None:
        raise error
    return cast(T, result)


async def _outcome(work: Coroutine[Any, Any, T]) -> tuple[T | None, BaseException | None]:
    """(result, None), or (None, what would end the event loop)."""
    try:
        return await work, None
    except (SystemExit, KeyboardInterrupt) as error:
        return None, error


def block_on(event: Signal, loop: asyncio.AbstractEventLoop, instead: str, timeout: float | None = None) -> bool:
    """Block this thread until ``event``, which ``loop`` sets; False after ``timeout`` seconds.

    See :func:`refuse_waiting`.
    """
    if event.is_set():
        return True
    refuse_waiting(loop, instead)
    return event.wait(timeout)


def is_cancelled(error: BaseException) -> bool:
    """Whether ``error`` is the cancellation of the current task, and not that of something it waited for."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


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
