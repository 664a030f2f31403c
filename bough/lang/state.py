"""What a program holds in its hand: its state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, overload

from bough.lang.executor import StreamExecutor
from bough.lang.group import ProgramStateGroup
from bough.lang.ir import (
    SglExpr,
    SglExprList,
    SglLease,
    SglRoleBegin,
    SglRoleEnd,
    SglVarScopeBegin,
    SglVarScopeEnd,
)
from bough.lang.report import Report
from bough.lang.types import Answer
from bough.lang.waiting import Signal, block_on, refuse_waiting

_INCREMENTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Of these, streamed meta information holds what is new; of everything else, what is so far."""


class _Hold:
    """Held by the states that nobody but their program's user has; the work stops when it is collected."""

    __slots__ = ("executor",)

    def __init__(self, executor: StreamExecutor) -> None:
        self.executor: StreamExecutor | None = executor

    def __del__(self) -> None:
        if self.executor is not None:
            self.executor.drop()


class ProgramState:
    """A text that grows, with variables. ``s += ...`` appends; ``s["name"]`` waits for a variable and gives it.

    When it is collected, what was appended and is not done yet is stopped; forks of it go on for themselves.
    In coroutines, ``await s.get("name")`` waits without blocking the event loop. What ``run`` gives with ``stream``
    waits for the end of the body as well, which may not have appended anything yet.
    """

    ret_value: Any = None
    _hold: _Hold | None = None
    _follows: asyncio.AbstractEventLoop | None = None
    """What the body needs to end, where it runs on beside whoever has this state."""

    def __init__(self, stream_executor: StreamExecutor) -> None:
        self._executor = stream_executor

    @classmethod
    def holding(cls, executor: StreamExecutor) -> ProgramState:
        """A state that stops ``executor`` when it is collected, with all its copies."""
        state = cls(executor)
        state._hold = _Hold(executor)
        return state

    def of_body(self) -> ProgramState:
        """This state for the body of its run, which appends to it and waits for no end of its own."""
        if self._follows is None:
            return self
        state = ProgramState(self._executor)
        state._hold = self._hold
        return state

    @property
    def stream_executor(self) -> StreamExecutor:
        """What does the work. Whoever takes it may wait for it without the state, so it works on without it."""
        if self._hold is not None:
            self._hold.executor = None
        return self._executor

    @overload
    def system(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def system(self, expr: str | SglExpr) -> SglExprList: ...
    def system(self, expr: Any = None) -> Any:
        """A message of that role: of ``expr``, which is appended and returned, or of a ``with`` block."""
        return self._role_common("system", expr)

    @overload
    def user(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: str | SglExpr) -> SglExprList: ...
    def user(self, expr: Any = None) -> Any:
        """See :meth:`system`."""
        return self._role_common("user", expr)

    @overload
    def assistant(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: str | SglExpr) -> SglExprList: ...
    def assistant(self, expr: Any = None) -> Any:
        """See :meth:`system`."""
        return self._role_common("assistant", expr)

    def _role_common(self, name: str, expr: Any = None) -> Any:
        if expr is None:
            return self._between(SglRoleBegin(name), SglRoleEnd(name))
        message = SglExprList([SglRoleBegin(name), expr, SglRoleEnd(name)])
        self._append(message)
        return message

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """The text that a ``with`` block appends becomes a variable."""
        return self._between(SglVarScopeBegin(name), SglVarScopeEnd(name))

    @contextmanager
    def _between(self, begin: SglExpr, end: SglExpr) -> Iterator[None]:
        self._append(begin)
        yield
        self._append(end)

    def _append(self, expr: Any) -> None:
        self._executor.submit(expr)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        """``size`` states that go on from here, each for itself. Waits for what was appended before."""
        self._wait(self._run_over(), "`await s.afork(n)`")
        copies = self._executor.fork(size, position_ids_offset)
        return ProgramStateGroup([ProgramState.holding(copy) for copy in copies], self)

    async def afork(self, size: int = 1) -> ProgramStateGroup:
        """As :meth:`fork`, without blocking."""
        await self.settled()
        copies = self._executor.copies(int(size))
        return ProgramStateGroup([ProgramState.holding(copy) for copy in copies], self)

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> Iterator[ProgramState]:
        """One state that goes on from here; its new variables come back as lists of one."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    def lease(self, ttl: float) -> None:
        """Ask for the text so far to stay in the engine's cache for ``ttl`` seconds, whatever becomes of the program.

        The text is computed where it is not, by a request of its own. What was granted is in the report. Other backends
        than bough's do nothing. Raises ValueError for a time that is none.
        """
        if not 0 < ttl < float("inf"):
            raise ValueError(f"a lease is for a number of seconds, not for {ttl!r}")
        self._append(SglLease(float(ttl)))

    def text(self) -> str:
        """The whole text, when everything was done."""
        self.sync()
        return self._executor.text()

    def messages(self) -> list[dict[str, Any]]:
        """The messages, as the OpenAI API has them."""
        self.sync()
        return self._executor.messages()

    def sync(self) -> None:
        """Wait until everything that was appended is done."""
        self._wait(self._run_over(), "`await s.settled()`")
        self._executor.sync()

    async def settled(self) -> ProgramState:
        """As :meth:`sync`, without blocking. Raises what ended the state early."""
        for signal in self._run_over():
            await signal.reached()
        await self._executor.idle.reached()
        if self._executor.error_ is not None:
            raise self._executor.failure("the state is incomplete")
        return self

    def error(self) -> BaseException | None:
        """What ended the state early; None where nothing did."""
        self.sync()
        return self._executor.error()

    def report(self) -> Report:
        """What the program, with all its forks, has done so far and what it cost."""
        return Report(self._executor.program)

    def cancel(self, reason: str = "cancelled by the caller") -> None:
        """Stop the whole program that this state belongs to, and its calls on the server."""
        self._executor.program.cancel(reason)

    async def get(self, name: Any) -> Any:
        """As ``s[name]``, without blocking."""
        for signal in self._announced(name):
            await signal.reached()
        event = self._executor.variable_event.get(name)
        if event is not None:
            await event.reached()
        return self._executor.value_of(name)

    def _run_over(self, or_else: Callable[[], bool] = lambda: False) -> Iterator[Signal]:
        """What to wait for until the body of the run that this follows has ended, or nothing more will come of it.

        Raises RuntimeError where nothing ever will, because nobody runs the event loop of a body's coroutine.
        """
        ex, loop = self._executor, self._follows
        while loop is not None:
            news = ex.news
            if or_else() or ex.ended.is_set() or ex.error_ is not None:
                return
            if loop is not ex.loop and not loop.is_running():
                raise RuntimeError(
                    "the event loop that the program was started on does not run, and so its body does not"
                )
            yield news

    def _announced(self, name: Any) -> Iterator[Signal]:
        """What to wait for until the body of the run that this follows has made a variable, or cannot any more."""
        ex = self._executor
        return self._run_over(lambda: name in ex.variable_event or name in ex.variables)

    def _wait(self, signals: Iterator[Signal], instead: str, until: float | None = None) -> None:
        """Block this thread, ``until`` a reading of the monotonic clock at most. Raises TimeoutError."""
        for signal in signals:
            if self._follows is not None and not signal.is_set():
                refuse_waiting(self._follows, instead)
            left = None if until is None else max(0.0, until - time.monotonic())
            if not block_on(signal, self._executor.loop, instead, left):
                raise TimeoutError("Timeout while waiting for the body of a program")

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """New text of the whole or of one variable as it comes, where the program streams; else all of it at once.

        Raises what ended the state early, after the text that there is.
        """
        for change in self._changes(var_name):
            if isinstance(change, tuple):
                yield change[0]
            else:
                block_on(change, self._executor.loop, "`async for piece in s.text_async_iter(...)`")

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As :meth:`text_iter`, for coroutines; with ``return_meta_data``, (new text, meta information)."""
        for change in self._changes(var_name):
            if isinstance(change, tuple):
                yield change if return_meta_data and var_name is not None and self._executor.stream else change[0]
            else:
                await change.reached()

    def _changes(self, var_name: str | None) -> Iterator[Any]:
        """(new text, meta information), or a Signal to wait for."""
        ex = self._executor
        if ex.stream:
            yield from self._text_changes() if var_name is None else self._variable_changes(var_name)
            return
        done = ex.idle if var_name is None else ex.variable_event.get(var_name)
        if done is not None:
            yield done
        yield (ex.text_ if var_name is None else ex.value_of(var_name)), None

    def _text_changes(self) -> Iterator[Any]:
        ex, at = self._executor, 0
        while True:
            news, finished, shown = ex.news, ex.is_finished, ex.shown
            if text := ex.text_[at:shown]:
                at += len(text)
                yield text, None
            if finished:
                break
            yield news
        if ex.error_ is not None:
            raise ex.failure("the text is incomplete")

    def _variable_changes(self, name: str) -> Iterator[Any]:
        ex, at, seen = self._executor, 0, 0
        pending: dict[str, Any] | None = None
        while True:
            news, finished = ex.news, ex.is_finished
            event = ex.variable_event.get(name)
            complete = event is not None and event.is_set()
            if name in ex.pieces:
                pieces = ex.pieces[name][seen:]
                seen += len(pieces)
                text = "".join(piece for piece, _ in pieces)
                for _, meta in pieces:
                    pending = merge_meta_info(pending, meta)
            else:
                text = str(ex.variables.get(name, ""))[at:] if complete else ""
                pending = ex.meta_info.get(name)
            at += len(text)
            if text:
                yield text, pending
                pending = None
            if complete or finished:
                break
            yield news
        if ex.error_ is not None and name not in ex.values_done:
            raise ex.failure(f"the variable {name!r} is incomplete")
        if event is None and not at:
            yield "", None

    def partial_iter(self, var_name: str) -> Iterator[Any]:
        """The values of a typed variable while it is written: objects whose fields are None until they are known.

        The last one is the value itself.
        """
        ex, written, shown, seen = self._executor, "", None, 0
        for piece in self.text_iter(var_name) if ex.stream else ():
            pieces = [text for text, _ in ex.pieces[var_name][seen:]] if var_name in ex.pieces else [piece]
            seen += len(pieces)
            for text in pieces:
                written += text
                kind = ex.types_wanted.get(var_name)
                partial = written if kind is None else Answer(kind).partial(written)
                if partial is not None and partial != shown:
                    shown = partial
                    yield partial
        if (final := self.get_var(var_name)) != shown or shown is None:
            yield final

    def __aiter__(self) -> AsyncIterator[str]:
        return self.text_async_iter()

    def get_var(self, name: Any) -> Any:
        self._wait(self._announced(name), "`await s.get(name)`")
        return self._executor.get_var(name)

    def set_var(self, name: Any, value: Any) -> None:
        self._executor.set_var(name, value)

    def get_meta_info(self, name: Any, timeout: float | None = None) -> Any:
        """What the backend said of a generation; None for an unknown name. Raises TimeoutError."""
        until = None if timeout is None else time.monotonic() + timeout
        self._wait(self._announced(name), "`await s.get(name)` first", until)
        return self._executor.get_meta_info(name, None if until is None else max(0.0, until - time.monotonic()))

    def __iadd__(self, other: Any) -> ProgramState:
        if other is None:
            raise ValueError("Tried to append None to state.")
        self._append(other)
        return self

    def __getitem__(self, name: Any) -> Any:
        return self.get_var(name)

    def __setitem__(self, name: Any, value: Any) -> None:
        self.set_var(name, value)

    def __contains__(self, name: Any) -> bool:
        return name in self._executor.variables

    def __repr__(self) -> str:
        # Event loops and debuggers show a run that is followed, and must not wait for it.
        return f"ProgramState({self.text() if self._follows is None else self._executor.text_})"


def merge_meta_info(earlier: dict[str, Any] | None, later: dict[str, Any]) -> dict[str, Any]:
    """The meta information of two pieces of a stream as that of one."""
    if earlier is None:
        return later
    merged = dict(later)
    for key in _INCREMENTS:
        if key in earlier or key in later:
            merged[key] = [*(earlier.get(key) or []), *(later.get(key) or [])]
    return merged
