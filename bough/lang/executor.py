"""The state of a program while it runs: a queue of nodes, and one task that works it off.

What needs nobody else (text, roles, scopes) is done at once by whoever appends it, while nothing is queued before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bough.lang import interpret
from bough.lang.errors import Cancelled, ProgramError
from bough.lang.habits import Answered
from bough.lang.ir import (
    SglAct,
    SglCommitLazy,
    SglExpr,
    SglExprList,
    SglGen,
    SglSelect,
    SglSeparateReasoning,
    SglVarScopeBegin,
)
from bough.lang.params import SglSamplingParams
from bough.lang.program import Call, Line, Program
from bough.lang.waiting import Signal, block_on, default_loop, is_cancelled, runs_here

if TYPE_CHECKING:
    from bough.lang.backends.base import BaseBackend
    from bough.lang.templates import ChatTemplate

logger = logging.getLogger(__name__)

Item = tuple[Any, Line | None]

_tasks: set[asyncio.Task[None]] = set()
"""Those under way; an event loop holds none that waits for what only its own state has."""

_NAMED = (SglGen, SglSelect, SglAct, SglVarScopeBegin, SglSeparateReasoning)
_MODEL = (SglGen, SglSelect, SglAct)


class StreamExecutor:
    """Executes the nodes of one state in order; states of a program run beside each other.

    Attributes are read by programs and tests: ``text_``, ``messages_``, ``variables``, ``meta_info``,
    ``variable_event``, ``arguments``, ``backend``, ``sid``, ``images_``, ``cur_images``, ``fork_start_text_pos``,
    ``is_finished``, ``ended`` (set when nothing more will be submitted), ``error_``. Of the text, followers see the
    first ``shown`` characters (None: all).

    Backends also read ``lora_path``, the adapter of the current call. ``next_text`` is what is likely to follow its
    answer, ``next_pause`` how many seconds later. ``lease`` says for how many seconds the text so far is to be kept,
    and how many messages that is. ``open_ended`` says that nobody knows how many calls the node under way will still
    make, ``answered`` is the last gen or select; ``sent`` names the call whose text the backend keeps, and has that
    text.
    """

    def __init__(
        self,
        backend: BaseBackend,
        arguments: dict[str, Any],
        default_sampling_para: SglSamplingParams,
        chat_template: ChatTemplate | None,
        stream: bool,
        num_api_spec_tokens: int | None = None,
        use_thread: bool = True,
        program: Program | None = None,
    ) -> None:
        self.sid = uuid.uuid4().hex
        self.backend = backend
        self.arguments = arguments
        self.default_sampling_para = default_sampling_para
        self.stream = stream
        self.program = program or Program("program")
        self.program.add(self)

        self.variables: dict[Any, Any] = {}
        self.variable_event: dict[Any, Signal] = {}
        self.stream_var_event: dict[Any, Signal] | None = {} if stream else None
        self.meta_info: dict[Any, Any] = {}
        self.error_: BaseException | None = None
        self.failed_call = ""

        self.text_ = ""
        self.messages_: list[dict[str, Any]] = []
        self.chat_template = chat_template or backend.get_chat_template()
        self.cur_role: str | None = None
        self.cur_role_begin_pos = 0
        self.images_: list[tuple[Any, str]] = []
        self.cur_images: list[tuple[Any, str]] = []

        self.fork_start_text_pos: int | None = None
        self.fork_name = ""
        self.fork_width = 1
        self.num_api_spec_tokens = num_api_spec_tokens
        self.speculated_text = ""
        self.spec_format: list[dict[str, Any]] = []
        self.spec_params: SglSamplingParams | None = None
        self.use_thread = use_thread
        self.last_node = ""
        self.current: Call | None = None
        self.lora_path: str | None = None
        self.next_text = ""
        self.next_pause: float | None = None
        self.lease: tuple[float, int] | None = None
        self.open_ended = False
        self.shown: int | None = None
        self.answered: Answered | None = None
        self.sent: tuple[dict[str, str], str] | None = None
        self.calls: list[Call] = []
        self.pieces: dict[Any, list[tuple[str, Any]]] = {}
        self.types_wanted: dict[Any, Any] = {}
        self.values_done: set[Any] = set()

        self.loop = backend.loop or default_loop()
        self.news = Signal()
        self.ended = Signal()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._news_lock = threading.Lock()
        self._queue: deque[Item] = deque()
        self._busy = False
        self._idle = Signal()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None
        self._error_seen = False

    def submit(self, expr: Any) -> None:
        """Append a node, or a text, to the state. Does not wait, unless the state has no task of its own."""
        self._announce(expr)
        line = caller_line()
        with self._lock:
            self._queue.extend((part, line) for part in _leaves(expr))
            if not self._busy:
                self._work_inline()
                if self._queue:
                    self._busy = True
                    self._idle = Signal()
                    self._launch()
        if not self.use_thread:
            self.sync()
            if self.error_ is not None:
                raise self.error_

    def sync(self) -> None:
        """Wait until everything that was submitted is done."""
        block_on(self._idle, self.loop, "`await s.settled()`")

    def get_var(self, name: Any) -> Any:
        """The value of a variable, awaited where it was announced.

        Raises KeyError where there is none, a ProgramError that names the failed call where that is why.
        """
        event = self.variable_event.get(name)
        if event is not None:
            block_on(event, self.loop, "`await s.get(name)`")
        return self.value_of(name)

    def value_of(self, name: Any) -> Any:
        """As :meth:`get_var`, for a variable that is there or never will be."""
        if self.error_ is not None and (name in self.variable_event or name not in self.variables):
            if name not in self.values_done:
                raise self.failure(f"the variable {name!r} has no value")
        return self.variables[name]

    def set_var(self, name: Any, value: Any) -> None:
        self.variables[name] = value
        if self.stream:
            self.ring()

    def get_meta_info(self, name: Any, timeout: float | None = None) -> Any:
        """What the backend said of a generation; None where there is nothing. Raises TimeoutError."""
        event = self.variable_event.get(name)
        if event is not None and not block_on(event, self.loop, "`await s.get(name)` first", timeout):
            raise TimeoutError(f"Timeout while waiting for event '{name}'")
        return self.meta_info.get(name)

    def text(self) -> str:
        self.sync()
        return self.text_

    def messages(self) -> list[dict[str, Any]]:
        self.sync()
        return self.messages_

    def error(self) -> BaseException | None:
        """What ended the state early, as it was raised; None where nothing did."""
        self.sync()
        self._error_seen = True
        return self.error_

    def failure(self, what: str) -> ProgramError:
        """An exception that says ``what`` is missing because a call failed, and which."""
        self._error_seen = True
        cause = self.error_
        if isinstance(cause, ProgramError):
            return cause
        error = ProgramError(f"{what}: {self.failed_call} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    @property
    def idle(self) -> Signal:
        """Set while nothing is queued; a new one whenever something is."""
        return self._idle

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to the state."""
        return (self.ended.is_set() and not self._busy) or self.error_ is not None

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> list[StreamExecutor]:
        """Copies that go on from here. Waits for what was submitted; ``position_ids_offset`` means nothing."""
        size = int(size)
        prepared = self.backend.keeps_texts or not self.backend.knows_programs
        if size > 1 and prepared and self.text_and_pending():
            self.submit(SglCommitLazy())
        block_on(self._idle, self.loop, "`await s.afork(n)`")
        return self.copies(size)

    def text_and_pending(self) -> bool:
        """Whether there is, or may come, any text."""
        return bool(self.text_) or self._busy

    def copies(self, size: int) -> list[StreamExecutor]:
        """``size`` states that begin as this one is now; siblings of one fork."""
        name = uuid.uuid4().hex[:12] if size > 1 else ""
        made = []
        for _ in range(size):
            child = StreamExecutor(
                self.backend, self.arguments, self.default_sampling_para, self.chat_template, self.stream,
                program=self.program,
            )  # fmt: skip
            child.variables = dict(self.variables)
            child.text_ = self.text_
            child.messages_ = list(self.messages_)
            child.cur_role = self.cur_role
            child.cur_role_begin_pos = self.cur_role_begin_pos
            child.fork_start_text_pos = len(self.text_)
            child.images_ = list(self.images_)
            child.last_node = self.last_node
            child.fork_name, child.fork_width = name, size
            child.answered, child.sent, child.lease = self.answered, self.sent, self.lease
            child.error_, child.failed_call = self.error_, self.failed_call
            made.append(child)
        return made

    def envelope(self, more: int = 0) -> dict[str, Any]:
        """What an engine that schedules by program is told with a request, after which the call makes ``more``.

        Not that it is the last one, which nobody knows before it has succeeded: the backend's ``end_program`` says so.
        """
        told: dict[str, Any] = {"id": self.program.id, "node": self.current.node if self.current else ""}
        if self.last_node:
            told["parent"] = self.last_node
        if self.fork_name:
            told |= {"fork": self.fork_name, "width": self.fork_width}
            self.fork_name = ""  # only the first calls of siblings begin together
        if self.program.priority:
            told["priority"] = self.program.priority
        limits = self.program.limits
        if limits.tokens is not None:
            told["budget"] = limits.tokens
        if (left := self.program.seconds_left()) is not None:
            told["deadline"] = left
        pending = [node for node, _ in self._queue if isinstance(node, _MODEL)]
        if self.ended.is_set():
            if not self.open_ended and not any(isinstance(node, SglAct) for node in pending):
                told["next_uses"] = len(pending) + more
        elif self.next_text and not pending:
            told["after"] = self.next_text
        if self.next_pause is not None and not more and told.get("next_uses") != 0:
            told["pause"] = round(self.next_pause, 3)
        return told

    def end(self) -> None:
        """Nothing more will be submitted. Idempotent."""
        if not self.ended.is_set():
            self.ended.set()
            self.ring()
            self._leave()

    def cancel(self, reason: str) -> None:
        """Stop the call that is under way and drop what is queued. A finished state stays as it is."""

        def stop() -> None:
            if not self.is_finished and (self._busy or not self.ended.is_set()):
                self.fail(Cancelled(f"cancelled: {reason}"), None, None)
                self._error_seen = True
            if self._task is not None:
                self._task.cancel()

        if runs_here(self.loop):
            stop()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(stop)

    def drop(self) -> None:
        """Nobody will append or ask any more. It is called wherever a state is collected: the loop does the rest."""
        if self._busy or not self.ended.is_set():
            with contextlib.suppress(RuntimeError):  # a loop that is closed has ended everything
                self.loop.call_soon_threadsafe(self._dropped)

    def _dropped(self) -> None:
        self.end()
        if self._busy:
            self.cancel("its state was dropped")

    def fail(self, error: BaseException, node: Any, line: Line | None) -> None:
        """The state ends here. Whoever waits for anything of it is woken."""
        self.error_ = error
        self.failed_call = interpret.describe(node) + (f" at {line}" if line else "")
        for event in list(self.variable_event.values()):
            event.set()
        for event in list((self.stream_var_event or {}).values()):
            event.set()
        self.ring()

    def announce(self, name: Any) -> None:
        """Let others wait for a variable, unless the state has failed and will never have it."""
        self.values_done.discard(name)
        event = self.variable_event[name] = Signal()
        streamed = Signal()
        if self.stream_var_event is not None:
            self.stream_var_event[name] = streamed
        if self.error_ is not None:  # fail() has woken those that were there, perhaps without these
            event.set()
            streamed.set()

    def settle(self, name: Any) -> None:
        """The value of a variable is complete."""
        self.values_done.add(name)
        if name in self.variable_event:
            self.variable_event[name].set()
        if self.stream_var_event is not None and name in self.stream_var_event:
            self.stream_var_event[name].set()
        self.ring()

    def ring(self) -> None:
        """Tell those who follow the state that something changed."""
        with self._news_lock:  # of two that ring at once, one would replace what the other has made and nobody will set
            news, self.news = self.news, Signal()
        news.set()

    def _announce(self, expr: Any) -> None:
        if isinstance(expr, _NAMED):
            self.announce(expr.name)
        elif isinstance(expr, SglExprList):
            for part in expr.expr_list:
                self._announce(part)

    def _work_inline(self) -> None:
        """Do what stands at the head of the queue and needs nobody else. Called with the lock held."""
        while self._queue:
            node, line = self._queue[0]
            if self.error_ is None:
                try:
                    if not interpret.apply(self, node):
                        return
                except Exception as error:
                    self.fail(error, node, line)
            self._queue.popleft()
            if self.stream:
                self.ring()

    def _launch(self) -> None:
        if runs_here(self.loop):
            self._start()
            return
        try:
            self.loop.call_soon_threadsafe(self._start, context=self._context)
        except RuntimeError as error:  # the loop is closed, and its engine with it
            self.fail(error, *self._queue[0])
            self._rest()

    def _start(self) -> None:
        self._task = self.loop.create_task(self._work(), context=self._context)
        _tasks.add(self._task)
        self._task.add_done_callback(self._stopped)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        if task is not self._task:  # it came to rest
            return
        error = None if task.cancelled() else task.exception()  # None: before its first step
        if self.error_ is None:
            self.fail(error or Cancelled("the event loop of the program ended"), None, None)
        with self._lock:
            self._rest()

    def _rest(self) -> None:
        """Nothing is being done any more, and nothing is left to do. Called with the lock held."""
        self._queue.clear()
        self._busy = False
        self._task = None
        self._idle.set()
        self.ring()
        self._leave()

    async def _work(self) -> None:
        while True:
            with self._lock:
                self._work_inline()
                if not self._queue:
                    self._rest()
                    return
                node, line = self._queue.popleft()
            try:
                await interpret.perform(self, node, line)
            except BaseException as error:  # SystemExit would end the event loop, and all programs with it
                if self.error_ is None:
                    ended = is_cancelled(error)
                    self.fail(Cancelled("the event loop of the program ended") if ended else error, node, line)
            self.ring()

    def _leave(self) -> None:
        """Tell the backend when the last state of the program is done."""
        if self.ended.is_set() and self.program.at_rest() and self.program.end():
            self.backend.end_program(self)

    def __del__(self) -> None:
        if self.error_ is not None and not self._error_seen and not sys.is_finalizing():
            logger.warning("a state of %s failed and nobody asked: %s", self.program.name, self.failure("unread"))


def _leaves(expr: Any) -> Iterator[Any]:
    if isinstance(expr, SglExprList):
        for part in expr.expr_list:
            yield from _leaves(part)
    else:
        yield expr


def caller_line() -> Line | None:
    """The line outside this package that the current call comes from."""
    frame = sys._getframe(1)
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(("bough.lang", "contextlib")):
            code = frame.f_code
            return Line(code.co_filename, frame.f_lineno, code.co_name)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


__all__ = ["SglExpr", "StreamExecutor"]
