"""Running the body of a program without a model, to learn what it will append and ask for."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import uuid
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bough.lang.backends import as_backend
from bough.lang.backends.base import BaseBackend
from bough.lang.drawing import draw, shown
from bough.lang.errors import ProgramError
from bough.lang.group import ProgramStateGroup
from bough.lang.ir import (
    SglAct,
    SglArgument,
    SglConstantText,
    SglExpr,
    SglExprList,
    SglFork,
    SglGen,
    SglGetForkItem,
    SglLease,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
)
from bough.lang.state import ProgramState
from bough.lang.waiting import Signal

if TYPE_CHECKING:
    from bough.lang.function import SglFunction

MOST_NODES = 100_000
"""A body that waits for a certain answer never sees it in a trace."""

_scope: contextvars.ContextVar[tuple[TracerProgramState, ...]] = contextvars.ContextVar("tracers", default=())


def current_tracer() -> TracerProgramState | None:
    """The innermost state that is being traced here."""
    return _scope.get()[-1] if _scope.get() else None


@contextmanager
def _tracing(tracer: TracerProgramState) -> Iterator[None]:
    token = _scope.set((*_scope.get(), tracer))
    try:
        yield
    finally:
        _scope.reset(token)


class StopTracing(Exception):
    """The constant beginning of a program is over."""


def extract_prefix_by_tracing(program: SglFunction, backend: BaseBackend) -> str:
    """The text that every run begins with, as far as it can be told without arguments."""
    arguments: dict[str, Any] = {name: SglArgument(name, None) for name in program.arg_names}
    tracer = TracerProgramState(backend, {**arguments, **program.bind_arguments}, only_trace_prefix=True)
    try:
        with _tracing(tracer):
            result = program.func(tracer, **tracer.arguments)
            if hasattr(result, "send"):
                result.send(None)  # a coroutine, as far as it goes without waiting
    except Exception:
        pass  # whatever the body did with a symbol: what it appended before is constant
    prefix = ""
    for node in tracer.flatten_nodes():
        if not isinstance(node, SglConstantText):
            break
        prefix += node.value
    return prefix


def trace_program(program: SglFunction, arguments: dict[str, Any], backend: Any) -> TracerProgramState:
    """The trace of a program with some arguments. Raises TypeError where the body needs the value of another."""
    symbols = {name: SglArgument(name, None) for name in program.arg_names if name not in arguments}
    tracer = TracerProgramState(
        BaseBackend() if backend is None else as_backend(backend),
        {**arguments, **symbols, **program.bind_arguments},
        only_trace_prefix=False,
    )
    with _tracing(tracer):
        tracer.ret_value = _result(program.func(tracer, **tracer.arguments))
    return tracer


def _result(returned: Any) -> Any:
    """What a body gave; a coroutine is run to its end, on a loop of its own because the caller's may be running."""
    if not inspect.iscoroutine(returned):
        return returned
    with ThreadPoolExecutor(1, "bough-trace") as pool:
        return pool.submit(contextvars.copy_context().run, asyncio.run, returned).result()


class TracerProgramState(ProgramState):
    """A state that collects nodes. Variables are symbols."""

    def __init__(self, backend: BaseBackend, arguments: dict[str, Any], only_trace_prefix: bool) -> None:
        self.pid = uuid.uuid4().hex
        self.backend = backend
        self.arguments = arguments
        self.only_trace_prefix = only_trace_prefix
        self.nodes: list[SglExpr] = []
        self.last_node: SglExpr | None = None
        self.variables: dict[str, SglVariable] = {}
        self.messages_: list[dict[str, Any]] = []
        self.cur_role: str | None = None
        self.chat_template = backend.get_chat_template()
        self.child_states: list[TracerProgramState] = []
        self.forks: list[tuple[int, list[TracerProgramState]]] = []  # behind how many nodes, and into what
        for outer in _scope.get():
            outer.child_states.append(self)

    async def afork(self, size: int = 1) -> ProgramStateGroup:
        return self.fork(size)

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        assert size >= 1
        if self.only_trace_prefix:
            raise StopTracing()
        node = SglFork(size)
        node.prev_node = self.last_node
        states = []
        for i in range(size):
            state = TracerProgramState(self.backend, self.arguments, self.only_trace_prefix)
            item = SglGetForkItem(i)
            item.prev_node = node
            state.last_node = item
            state.variables = dict(self.variables)
            state.messages_ = list(self.messages_)
            state.cur_role = self.cur_role
            state.chat_template = self.chat_template
            states.append(state)
        self.forks.append((len(self.nodes), states))
        return _TracedGroup(list(states), self)

    def sync(self) -> None:
        """There is nothing to wait for."""

    async def settled(self) -> ProgramState:
        return self

    def error(self) -> BaseException | None:
        return None

    def text(self) -> str:
        """The text as far as it is known, with the names of symbols and of what the model will write in braces."""
        return "".join(map(shown, self.flatten_nodes()))

    def messages(self) -> list[dict[str, Any]]:
        return self.messages_

    def get_meta_info(self, name: Any, timeout: float | None = None) -> Any:
        """There is none without a model."""
        return None

    def _changes(self, var_name: str | None) -> Iterator[Any]:
        yield (self.text() if var_name is None else f"{{{var_name}}}"), None

    async def get(self, name: Any) -> Any:
        return self.get_var(name)

    def get_var(self, name: Any) -> Any:
        if self.arguments.get(name) is not None:
            return self.arguments[name]
        variable = self.variables[name]
        return SglVariable(variable.name, variable.source)

    def set_var(self, name: Any, value: Any) -> None:
        self.arguments[name] = value

    def __contains__(self, name: Any) -> bool:
        return name in self.variables

    def __repr__(self) -> str:
        return f"TracerProgramState({self.flatten_nodes()})"

    def flatten_nodes(self) -> list[SglExpr]:
        """The nodes in order, lists taken apart."""
        return [leaf for node in self.nodes for leaf in _leaves(node)]

    def drawing(self) -> str:
        """The calls as a tree: each below the text that it continues, branches below what they share."""
        return draw(self)

    def show(self) -> None:
        """Write :meth:`drawing` to the standard output."""
        sys.stdout.write(self.drawing() + "\n")

    def _append(self, expr: Any) -> None:
        node = SglConstantText(expr) if isinstance(expr, str) else expr
        node.pid = self.pid
        match node:
            case SglExprList(expr_list=parts):
                for part in parts:
                    self._append(part)
            case SglGen(name=name) | SglSelect(name=name) | SglAct(name=name):
                if self.only_trace_prefix:
                    raise StopTracing()
                kind = {SglGen: "gen_", SglSelect: "select_", SglAct: "act_"}[type(node)]
                self._name(name or kind + str(len(self.variables)), node)
                self._add(node)
            case SglRoleBegin(role=role):
                self._begin_role(role)
            case SglRoleEnd(role=role):
                self._add(SglConstantText(self.chat_template.get_prefix_and_suffix(role, self.messages_)[1]))
                self.messages_.append({"role": role, "content": ""})
                self.cur_role = None
            case SglVarScopeBegin() | SglLease():
                pass
            case SglVarScopeEnd(name=name):
                self._name(name, self.last_node)
            case SglConstantText():
                self._add(node)
            case _:
                if self.only_trace_prefix:
                    raise StopTracing()
                self._add(node)

    def _begin_role(self, role: str) -> None:
        assert self.cur_role is None, "Nested roles are not allowed."
        default = self.chat_template.default_system_prompt
        if not self.messages_ and role != "system" and default:
            for node in (SglRoleBegin("system"), default, SglRoleEnd("system")):
                self._append(node)
        self.cur_role = role
        self._add(SglConstantText(self.chat_template.get_prefix_and_suffix(role, self.messages_)[0]))

    def _add(self, node: SglExpr) -> None:
        if len(self.nodes) == MOST_NODES:
            raise ProgramError(f"the trace of a program does not end: {MOST_NODES} nodes")
        self.nodes.append(node)
        node.prev_node = self.last_node
        self.last_node = node

    def _name(self, name: str, source: SglExpr | None) -> None:
        self.variables[name] = SglVariable(name, source)


class _TracedGroup(ProgramStateGroup):
    """Traced states. Joining them makes their variables known to the state that was forked."""

    def _joining(
        self, mode: str, name: Any, valid: Any, key: Any, until: Any
    ) -> Generator[Signal, None, Sequence[int]]:
        source = self.src_state
        assert isinstance(source, TracerProgramState)
        for state in self.states:
            assert isinstance(state, TracerProgramState)
            for variable in state.variables.values():
                source.variables.setdefault(variable.name, variable)
        return range(len(self.states))
        yield

    def end(self) -> None:
        """There is nothing to end."""


def _leaves(node: SglExpr) -> Iterator[SglExpr]:
    if isinstance(node, SglExprList):
        for part in node.expr_list:
            yield from _leaves(part)
    else:
        yield node
