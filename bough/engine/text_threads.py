"""Threads for what is done with texts. Texts take turns by tenant and by size, and the memory of all has a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bough.base.turns import Turns
from bough.engine.heap import trim_heap
from bough.text.memory import PIECE, Steps

T = TypeVar("T")

LARGE = 1 << 20
"""Characters up to which a step does not wait for larger ones. To tokenize takes up to 300 bytes for one."""
THREADS = 3, 2, 2, 1
"""How many do first steps of up to a piece, how many further ones, and how many those up to ``LARGE`` and beyond."""


@dataclass(eq=False, slots=True)
class _Job(Generic[T]):
    """A text at work, or its next step, which waits in ``lane``."""

    steps: Steps[T]
    tenant: str
    result: asyncio.Future[T]
    lane: _Lane


@dataclass(eq=False, slots=True)
class _Lane:
    """Steps of about the same size, which wait for each other; so many more may be under way as are ``free``."""

    free: int
    waiting: Turns[_Job[Any], _Job[Any]] = field(default_factory=Turns)


class TextThreads:
    """Runs work on texts off the event loop, to which it belongs.

    A long text is worked on in steps, between which it waits for its tenant's turn once more. It begins among the short
    texts and goes on among the long ones. So a step waits for one of every other tenant, and for one of each text of
    its own, but for none that is much larger.
    """

    def __init__(self, threads: tuple[int, int, int, int] = THREADS) -> None:
        """``threads``: as the constant of this module."""
        self._pool = ThreadPoolExecutor(sum(threads), "bough-text")
        self._lanes = [_Lane(n) for n in threads]
        self._closed = False

    async def run(self, work: Callable[[], T], tenant: str = "") -> T:
        """What ``work`` returns, which takes no longer than a piece of a text does."""

        def steps() -> Steps[T]:
            yield 0
            return work()

        return await self.run_steps(steps(), tenant)

    async def run_steps(self, steps: Steps[T], tenant: str = "") -> T:
        """What ``steps`` return, of which there is at least one; none is begun for which nobody waits any more."""
        lane = self._lane_of(next(steps), first=True)
        job = _Job(steps, tenant, asyncio.get_running_loop().create_future(), lane)
        self._wait(job)
        try:
            result: T = await job.result
            return result
        finally:
            job.lane.waiting.drop(job)

    def close(self) -> None:
        """Wait for the step that each thread is at; the others are dropped."""
        self._closed = True
        for lane in self._lanes:
            while (job := lane.waiting.pop()) is not None:
                job.result.cancel()
        self._pool.shutdown(wait=True)

    def _lane_of(self, size: int, *, first: bool) -> _Lane:
        """Where a step of ``size`` characters waits."""
        if size <= PIECE:
            return self._lanes[0 if first else 1]
        return self._lanes[2 if size <= LARGE else 3]

    def _wait(self, job: _Job[Any]) -> None:
        job.lane.waiting.push(job.tenant, job, job)
        self._begin(job.lane)

    def _begin(self, lane: _Lane) -> None:
        while lane.free and (job := lane.waiting.pop()) is not None:
            self._do(lane, job)

    def _do(self, lane: _Lane, job: _Job[Any]) -> None:
        """The next step of ``job`` on a thread."""
        loop = asyncio.get_running_loop()

        def ended(step: Future[int | _Ended]) -> None:
            loop.call_soon_threadsafe(self._ended, lane, job, step)

        try:
            step = self._pool.submit(_next, job.steps, trims=lane is self._lanes[-1])
        except RuntimeError as error:  # no thread can be had, or none will be any more
            job.result.set_exception(error)
            return
        lane.free -= 1
        step.add_done_callback(ended)

    def _ended(self, lane: _Lane, job: _Job[Any], step: Future[int | _Ended]) -> None:
        lane.free += 1
        if self._closed:
            job.result.cancel()
            return
        if job.result.done():  # nobody waits for it
            job.steps.close()
        elif (error := step.exception()) is not None:
            job.result.set_exception(error)
        elif isinstance(size := step.result(), _Ended):
            job.result.set_result(size.value)
        else:
            job.lane = self._lane_of(size, first=False)
            self._wait(job)
        self._begin(lane)


@dataclass(frozen=True, slots=True)
class _Ended:
    """What steps returned."""

    value: Any


def _next(steps: Steps[Any], *, trims: bool) -> int | _Ended:
    """The size of the step after the next one, which is done here; ``trims`` what it leaves behind."""
    try:
        return next(steps)
    except StopIteration as end:
        return _Ended(end.value)
    finally:
        if trims:
            trim_heap()
