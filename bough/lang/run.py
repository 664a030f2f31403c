"""Running programs: one, many, from threads and from coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tqdm import tqdm

from bough.lang.backends import as_backend
from bough.lang.backends.base import BaseBackend, in_thread
from bough.lang.config import global_config
from bough.lang.executor import StreamExecutor
from bough.lang.function import SglFunction
from bough.lang.params import SglSamplingParams
from bough.lang.program import Program
from bough.lang.state import ProgramState
from bough.lang.trace import extract_prefix_by_tracing
from bough.lang.waiting import Signal, block_on, default_loop, refuse_waiting, wait_for

logger = logging.getLogger(__name__)

IN_FLIGHT = 1024
"""Programs of a batch that are in work at a time unless the caller says how many."""
AHEAD = 200
"""States of a batch that may be ready before the consumer of its iterator takes them."""
PREFIX_CHARS = 64
"""Shorter constant beginnings are not worth a request."""
BATCH_AWAITED = "`await asyncio.gather(*(program.arun(...) for ...))`"
"""What coroutines use in the place of a batch."""


def run_program(
    program: SglFunction,
    backend: Any,
    func_args: tuple[Any, ...],
    func_kwargs: dict[str, Any],
    default_sampling_para: SglSamplingParams,
    stream: bool,
    sync: bool = False,
    use_thread: bool = True,
) -> ProgramState:
    """Run the body here, or on a thread where it streams; ``sync`` waits for the model as well."""
    state = new_state(program, backend, func_kwargs, default_sampling_para, stream, use_thread)
    body = _body(program, state, func_args, func_kwargs, unheard=stream)
    if stream:

        def follow() -> None:
            with contextlib.suppress(BaseException):  # its state says it, and nobody else on this thread hears of it
                body()

        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(follow,), name="bough-program").start()
        return state
    try:
        body()
    except BaseException as error:
        state.cancel(_raised(error))
        raise
    if sync:
        state.sync()
    _show(state)
    return state


async def arun_program(
    program: SglFunction,
    backend: Any,
    func_args: tuple[Any, ...],
    func_kwargs: dict[str, Any],
    default_sampling_para: SglSamplingParams,
    stream: bool,
) -> ProgramState:
    """As :func:`run_program` with ``sync``, without blocking; with ``stream`` back at once."""
    state = new_state(program, backend, func_kwargs, default_sampling_para, stream, True)
    if stream:
        state._follows = asyncio.get_running_loop()  # which runs the body, or what begins it
    work = _abody(program, state, func_args, func_kwargs, unheard=stream)
    if stream:
        task = asyncio.get_running_loop().create_task(work)
        _tasks.add(task)
        task.add_done_callback(functools.partial(_over, state))
        return state
    try:
        await work
        await state._executor.idle.reached()
    except BaseException as error:
        state.cancel(_raised(error))
        raise
    return state


_tasks: set[asyncio.Task[None]] = set()
"""Bodies that run on; the event loop itself would forget them."""


def _over(state: ProgramState, task: asyncio.Task[None]) -> None:
    _tasks.discard(task)
    if not state._executor.ended.is_set():  # it was cancelled, before it began or while a thread has its body
        _fail(state, asyncio.CancelledError())
        state._executor.end()


def _fail(state: ProgramState, error: BaseException) -> None:
    """The body of ``state`` has raised ``error``, which nobody catches: its calls stop."""
    state._executor.fail(error, None, None)
    state.cancel(_raised(error))


def _raised(error: BaseException) -> str:
    return f"its body raised {type(error).__name__}"


def new_state(
    program: SglFunction,
    backend: Any,
    arguments: dict[str, Any],
    default_sampling_para: SglSamplingParams,
    stream: bool,
    use_thread: bool,
) -> ProgramState:
    """The empty state that a run begins with."""
    assert backend is not None, "Please specify a backend"
    name = getattr(program.func, "__name__", "program")
    executor = StreamExecutor(
        as_backend(backend), arguments, default_sampling_para, None, stream, program.num_api_spec_tokens, use_thread,
        Program(name, program.limits, program.retry, program.habits, priority=program.priority),
    )  # fmt: skip
    state = ProgramState.holding(executor)
    state._follows = executor.loop if stream else None
    return state


@contextlib.contextmanager
def _running(state: ProgramState, unheard: bool) -> Iterator[None]:
    """Around a body, with which its state ends. ``unheard``: what it raises is heard by who follows the state alone."""
    try:
        yield
    except BaseException as error:
        # A body that stopped because one of its calls failed has said nothing new.
        if unheard and state._executor.error_ is None:
            _fail(state, error)
        if not unheard or not isinstance(error, Exception):
            raise
    finally:
        state._executor.end()


def _body(
    program: SglFunction, state: ProgramState, args: tuple[Any, ...], kwargs: dict[str, Any], *, unheard: bool
) -> Callable[[], None]:
    """The body as something to call that waits until it ends. See :func:`_running`."""

    def body() -> None:
        with _running(state, unheard):
            result = program.func(state.of_body(), *args, **kwargs)
            if inspect.isawaitable(result):
                work = result if inspect.iscoroutine(result) else _awaited(result)
                result = wait_for(work, state._executor.loop, "`await program.arun(...)`")
            state.ret_value = result

    return body


async def _abody(
    program: SglFunction, state: ProgramState, args: tuple[Any, ...], kwargs: dict[str, Any], *, unheard: bool
) -> None:
    if not inspect.iscoroutinefunction(program.func):
        await in_thread(_body(program, state, args, kwargs, unheard=unheard))
        return
    with _running(state, unheard):
        state.ret_value = await program.func(state.of_body(), *args, **kwargs)


async def _awaited(result: Any) -> Any:
    return await result


def run_program_batch(
    program: SglFunction,
    backend: Any,
    batch_arguments: list[dict[str, Any]],
    default_sampling_para: SglSamplingParams,
    num_threads: str | int,
    progress_bar: bool,
    generator_style: bool = False,
) -> list[ProgramState] | Iterator[ProgramState]:
    """See :meth:`SglFunction.run_batch`."""
    assert backend is not None, "Please specify a backend"
    backend = as_backend(backend)
    refuse_waiting(backend.loop or default_loop(), BATCH_AWAITED)
    if global_config.enable_precache_with_tracing and len(batch_arguments) > 1:
        cache_program(program, backend)
    batch = _Batch(program, backend, default_sampling_para, num_threads, len(batch_arguments))
    if generator_style:
        return batch.states(batch_arguments, AHEAD, progress_bar)
    return list(batch.states(batch_arguments, len(batch_arguments), progress_bar))


class _Batch:
    """Programs in work. Bodies take a thread each, for as long as they run; what the model still does takes none."""

    def __init__(
        self, program: SglFunction, backend: BaseBackend, params: SglSamplingParams, num_threads: str | int, size: int
    ) -> None:
        self.program = program
        self.backend = backend
        self.params = params
        if isinstance(num_threads, int):
            threads, in_flight = num_threads, num_threads
        else:
            threads, in_flight = max(96, 16 * (os.cpu_count() or 1)), IN_FLIGHT
        self.pool = ThreadPoolExecutor(max(1, min(threads, size)), "bough-batch")
        self.room = threading.Semaphore(max(1, in_flight))

    def states(self, arguments: list[dict[str, Any]], ahead: int, progress_bar: bool) -> Iterator[ProgramState]:
        """All states in order; at most ``ahead`` are begun before the first that was not taken."""
        begun: deque[tuple[ProgramState, Signal]] = deque()
        waiting = iter(arguments)
        bar = tqdm(total=len(arguments), disable=not progress_bar)
        try:
            while True:
                while len(begun) < ahead and (given := next(waiting, None)) is not None:
                    begun.append(self._begin(given, bar))
                if not begun:
                    return
                block_on(begun[0][1], self.backend.loop or default_loop(), BATCH_AWAITED)
                yield begun.popleft()[0]
        except BaseException:
            for state, _ in begun:
                state.cancel("the batch was left")
            raise
        finally:
            bar.close()
            self.pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, arguments: dict[str, Any], bar: Any) -> tuple[ProgramState, Signal]:
        self.room.acquire()
        state = new_state(self.program, self.backend, arguments, self.params, False, True)
        body, done = _body(self.program, state, (), arguments, unheard=True), Signal()

        def finished() -> None:
            bar.update()
            self.room.release()
            done.set()

        def work() -> None:
            try:
                body()
            finally:
                state._executor.idle.then(finished)

        self.pool.submit(contextvars.copy_context().run, work)
        return state, done


def cache_program(program: SglFunction, backend: Any) -> None:
    """Have the constant beginning of a program computed, where it is worth it."""
    prefix = extract_prefix_by_tracing(program, as_backend(backend))
    if len(prefix) > PREFIX_CHARS:
        try:
            as_backend(backend).cache_prefix(prefix)
        except Exception as error:  # it would only have saved time, and whoever runs hears of a server that is down
            logger.warning("the beginning of %s is not computed ahead: %s", program.func.__name__, error)


def _show(state: ProgramState) -> None:
    if global_config.verbosity >= 2:
        sys.stdout.write(state.text() + "\n")
