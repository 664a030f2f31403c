"""Threads for what is done with texts, of which long ones take turns: the memory of tokenizing has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = 4
UNIT = 64 << 10
"""Characters up to which a text does not wait for others."""
UNITS = 32
"""Of so many characters, in units, long texts are worked on at one time. To tokenize takes up to 300 bytes for one."""


class TextThreads:
    """Runs work on texts off the event loop. Belongs to one event loop."""

    def __init__(self, units: int = UNITS) -> None:
        """``units``: as the constant of this module."""
        self._pool = ThreadPoolExecutor(THREADS, "bough-text")
        self._most = units
        self._units = asyncio.Semaphore(units)
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T], size: int = 0) -> T:
        """What ``work`` returns, which is done on a text of ``size`` characters.

        A text longer than all units is worked on while no other long one is; they come in order. What is given back
        by a thread is given back when it is done, also where nobody waits for it any more.
        """
        units = min(size // UNIT, self._most)
        held = 0
        try:
            if units:
                async with self._turn:
                    while held < units:
                        await self._units.acquire()
                        held += 1
            future = self._pool.submit(work)
        except BaseException:
            self._release(held)
            raise
        if held:
            loop = asyncio.get_running_loop()

            def done(_: Future[T]) -> None:
                loop.call_soon_threadsafe(self._release, held)

            future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Wait for the text that each thread is at; the others are dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _release(self, units: int) -> None:
        for _ in range(units):
            self._units.release()
