"""Tools that the model may call, and the loop in which it does.

A call is JSON that the engine constrains to the tools' schemas, so any model can make one, through any backend that
can constrain to a JSON Schema.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, overload

import msgspec

from bough.lang import calls, turns
from bough.lang.backends.base import in_thread
from bough.lang.errors import InvalidAnswer
from bough.lang.habits import Habits
from bough.lang.ir import SglAct, SglGen
from bough.lang.program import Line, remaining
from bough.lang.types import convert, pydantic_reads, schema_of
from bough.lang.waiting import is_cancelled

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor

ANSWER = "answer"
"""Name under which the model gives its answer instead of calling a tool."""
NEARLY_ALL = 0.9
"""Share of the calls of tools that take no longer than the pause that an engine is told.

It keeps what it has for about as long: too long costs nothing, since whoever is back sooner says so, but for a rare
tool that takes so much longer than the others that nothing would be kept through the calls of those.
"""


class Tool:
    """A function that the model may call; its parameters' types and its docstring are what the model knows of it.

    Args:
        seconds: after which a call of it fails.
        pause: seconds that a call of it is expected to take, which the engine is told before each step that may make
            one; by default what calls of it have taken so far.

    Raises TypeError for a parameter that has no type, or one without a JSON Schema, or that cannot be given by its
    name; ValueError for a tool that is named ``answer``.
    """

    def __init__(self, func: Callable[..., Any], *, seconds: float | None = None, pause: float | None = None) -> None:
        self.func = func
        self.name = func.__name__
        self.seconds = seconds
        self.pause = pause
        self.description = inspect.getdoc(func) or ""
        hints = typing.get_type_hints(func)
        accepted: list[Any] = []
        if self.name == ANSWER:
            raise ValueError(f"a tool cannot be named {ANSWER!r}: so the model gives its answer")
        for name, parameter in inspect.signature(func).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"the parameter {name!r} of the tool {self.name!r} cannot be given by its name")
            if name not in hints:
                raise TypeError(f"the parameter {name!r} of the tool {self.name!r} has no type")
            default = parameter.default
            accepted.append((name, hints[name]) if default is parameter.empty else (name, hints[name], default))
        self._names = [name for name, *_ in accepted]
        self._arguments = _arguments_type(f"{self.name}_arguments", accepted)
        self.parameters = _inlined(schema_of(self._arguments))

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    def described(self) -> dict[str, Any]:
        """The tool as the OpenAI API describes one."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The result for arguments as the model wrote them; a function that is no coroutine runs on a thread."""
        given = convert(arguments, self._arguments)
        values = {name: getattr(given, field) for name, field in zip(self._names, _fields(self._arguments))}
        async with asyncio.timeout(self.seconds):
            if inspect.iscoroutinefunction(self.func):
                return await self.func(**values)
            return await in_thread(lambda: self.func(**values))


@overload
def tool(func: Callable[..., Any]) -> Tool: ...
@overload
def tool(*, seconds: float | None = None, pause: float | None = None) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    func: Callable[..., Any] | None = None, *, seconds: float | None = None, pause: float | None = None
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a function, see :class:`Tool`."""

    def make(function: Callable[..., Any]) -> Tool:
        return Tool(function, seconds=seconds, pause=pause)

    return make if func is None else make(func)


def as_tool(given: Tool | Callable[..., Any]) -> Tool:
    return given if isinstance(given, Tool) else Tool(given)


@dataclass(slots=True)
class ToolCall:
    """One call that the model made: what it asked, what it got, what went wrong, how long it took."""

    tool: str
    arguments: dict[str, Any]
    result: Any = None
    error: str = ""
    seconds: float = 0.0

    def shown(self) -> dict[str, Any]:
        """The call as meta information; the result is the very object that the tool returned."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def tools_prompt(tools: Sequence[Tool | Callable[..., Any]]) -> str:
    """A text, for a system message, that tells a model which tools there are and how to call them."""
    lines = ["You can call tools. Each of your messages is one JSON object, and nothing else. To call a tool write",
             '{"tool": NAME, "arguments": {...}}; its result is told to you. When you know the answer, write',
             '{"tool": "answer", "arguments": {"answer": ...}}. The tools are:']  # fmt: skip
    for one in map(as_tool, tools):
        lines.append(f"- {one.name}: {one.description} Arguments: {json.dumps(one.parameters, ensure_ascii=False)}")
    return "\n".join(lines)


async def run_tool_loop(ex: StreamExecutor, expr: SglAct, line: Line | None) -> None:
    """Steps of an SglAct until there is an answer."""
    tools = {one.name: one for one in expr.tools}
    made: list[ToolCall] = []
    answer_schema = _answer_schema(expr.answer)
    while True:
        last = len(made) >= expr.max_steps
        ex.open_ended = not last
        schema = json.dumps(_step_schema([] if last else expr.tools, answer_schema), ensure_ascii=False)
        turns.begin_role(ex, "assistant")
        pause = None if last else _expected_pause(expr.tools, ex.program.habits)
        chosen, arguments = await _step(ex, expr, schema, line, pause)
        turns.end_role(ex, "assistant")
        if chosen == ANSWER:
            break
        assert ex.answered is not None
        ex.answered.at = None  # the tool's time is the tool's; the place learns what follows the answer
        call, told = await _called(ex, tools[chosen], arguments, line)
        made.append(call)
        turns.begin_role(ex, "user")
        turns.fill(ex, f"{chosen}: {told}")
        turns.end_role(ex, "user")
    ex.open_ended = False
    ex.variables[expr.name] = _typed(expr.answer, arguments.get(ANSWER))
    ex.meta_info[expr.name] = {"tool_calls": [call.shown() for call in made]}
    ex.settle(expr.name)


def _expected_pause(tools: Sequence[Tool], habits: Habits) -> float | None:
    """Seconds that nearly all calls of ``tools`` take at most, each counted once more than it was called.

    None where nothing is known of any of them.
    """
    known = []
    for one in tools:
        mean, n = habits.pause(one.name)
        pause = mean if one.pause is None else one.pause
        if pause is not None:
            known.append((pause, n + 1))
    left = NEARLY_ALL * sum(n for _, n in known)
    for pause, n in sorted(known):
        left -= n
        if left <= 0:
            return pause
    return None


async def _step(
    ex: StreamExecutor, expr: SglAct, schema: str, line: Line | None, pause: float | None
) -> tuple[str, dict[str, Any]]:
    """(tool or answer, its arguments) as the model writes them."""
    hidden = f"{expr.name or 'act'} step"
    gen = SglGen(hidden, json_schema=schema)
    gen.sampling_params = expr.answer.sampling_params
    gen.sampling_params.json_schema = schema
    ex.announce(hidden)
    await calls.generate(ex, gen, line, pause)
    text = ex.variables.pop(hidden)
    try:
        step = msgspec.json.decode(text)
        return str(step["tool"]), dict(step["arguments"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidAnswer("it is no complete call of a tool", text) from error


async def _called(ex: StreamExecutor, tool: Tool, arguments: dict[str, Any], line: Line | None) -> tuple[ToolCall, str]:
    """Make one call; (it, what the model is told). Its failure is news for the model and no error of the program."""
    made = ToolCall(tool.name, arguments)
    async with calls.recorded(ex, "tool", tool.name, line) as call:
        began = time.perf_counter()
        try:
            async with remaining(ex.program.seconds_left(), None):
                made.result = await tool.call(arguments)
            told = _text(made.result)
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled(error):
                raise
            told = made.error = call.error = f"{type(error).__name__}: {error}"
        made.seconds = time.perf_counter() - began
        ex.program.habits.paused(tool.name, made.seconds)
    ex.program.seconds_left()
    return made, told


def _arguments_type(name: str, accepted: list[Any]) -> Any:
    """The type of what a tool accepts: (name, type) or (name, type, default) each. Where Pydantic has to read it, the
    fields are numbered, as a name may be one of its methods'."""
    if not any(pydantic_reads(hint) for _, hint, *_ in accepted):
        return msgspec.defstruct(name, accepted, forbid_unknown_fields=True, kw_only=True)
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {
        f"argument_{i}": (hint, Field(*default, alias=alias)) for i, (alias, hint, *default) in enumerate(accepted)
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)


def _fields(arguments: Any) -> Sequence[str]:
    """The names of the fields of what :func:`_arguments_type` made."""
    return arguments.__struct_fields__ if issubclass(arguments, msgspec.Struct) else list(arguments.model_fields)


def _step_schema(tools: Sequence[Tool], answer: dict[str, Any]) -> dict[str, Any]:
    """What one step may be: a call of one of the tools, or the answer."""
    kinds = [_one_step(tool.name, tool.parameters) for tool in tools]
    about = {"type": "object", "properties": {ANSWER: answer}, "required": [ANSWER], "additionalProperties": False}
    return {"anyOf": [*kinds, _one_step(ANSWER, about)]}


def _one_step(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"tool": {"const": name}, "arguments": arguments},
        "required": ["tool", "arguments"],
        "additionalProperties": False,
    }


def _answer_schema(answer: SglGen) -> dict[str, Any]:
    return {"type": "string"} if answer.type in (None, str) else _inlined(schema_of(answer.type))


def _typed(answer: SglGen, value: Any) -> Any:
    return value if answer.type is None or isinstance(answer.type, dict) else convert(value, answer.type)


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references, so that it can stand inside another. Raises TypeError for a recursive one."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any, above: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [resolve(item, above) for item in node]
        if not isinstance(node, dict):
            return node
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in above:
            raise TypeError(f"the type {name} contains itself, which a tool cannot take")
        if name in definitions:
            return resolve(definitions[name], (*above, name))
        return {key: resolve(value, above) for key, value in node.items()}

    return dict(resolve(schema, ()))


def _text(result: Any) -> str:
    """A result as the model reads it."""
    if isinstance(result, str):
        return result
    return json.dumps(msgspec.to_builtins(result, enc_hook=_plain), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """What JSON has for an object that msgspec does not know: the fields of a Pydantic model, else its text."""
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else str(value)
