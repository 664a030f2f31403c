"""One choice of a chat answer: what its chunks say, as deltas of a stream or as a message."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from bough.base.messages import Finish
from bough.engine.generation import Chunk
from bough.server.answers import (
    Delta,
    Function,
    FunctionDelta,
    Message,
    ToolCall,
    ToolCallDelta,
    check_finish,
)
from bough.text.answer import AnswerParser
from bough.text.events import CallArguments, CallStart, Content, Event, Reasoning, Trouble
from bough.text.tools.format import Family

_SHORT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def call_ids(family: Family | None, earlier: int) -> Callable[[CallStart], str]:
    """Makes the ids of calls, in the form that the family's template accepts; ``earlier`` calls were made before."""
    form = "hex" if family is None else family.id_form

    def make(call: CallStart) -> str:
        if form == "hex":
            return f"call_{secrets.token_hex(12)}"
        if form == "short":
            return call.id or "".join(secrets.choice(_SHORT) for _ in range(9))
        return form.format(name=call.name, index=earlier + call.index)

    return make


@dataclass(slots=True)
class Reply:
    """A choice as its chunks arrive.

    Attributes:
        parser: of its text.
        call_id: makes ids.
        legacy: a call is a ``function_call``.
        parallel: more than one call is reported.
        show_reasoning: reasoning is reported.
        token_length: bytes of text that a token contributes.
    """

    parser: AnswerParser
    call_id: Callable[[CallStart], str]
    legacy: bool
    parallel: bool
    show_reasoning: bool
    token_length: Callable[[int], int]
    reasoning_tokens: int = 0
    trouble: str | None = None
    calls: int = 0
    _lengths: list[int] = field(default_factory=list)
    _spent: int = 0

    def take(self, chunk: Chunk) -> list[Delta]:
        """What ``chunk`` says."""
        events = self.parser.push(chunk.text) if chunk.text else []
        if chunk.finish is not None:
            events += self.parser.finish()
        self._count(chunk)
        deltas = [self._delta(event) for event in events]
        return [delta for delta in deltas if delta is not None]

    def reason(self, finish: Finish) -> str:
        """The finish reason. Raises what an end that is not a good one means."""
        kind = check_finish(finish)
        if kind == "stop" and self.calls:
            return "function_call" if self.legacy else "tool_calls"
        return kind

    def _delta(self, event: Event) -> Delta | None:
        match event:
            case Content(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text, reasoning=text) if self.show_reasoning else None
            case Trouble(reason, index):
                if self.trouble is None and (index is None or self._reported(index)):
                    self.trouble = reason
                return None
            case CallStart() if not self._reported(event.index):
                self.trouble = self.trouble or f"the request allows one call; another, of {event.name!r}, was left out"
                return None
            case CallStart():
                self.calls += 1
                function = FunctionDelta(event.name, "")
                if self.legacy:
                    return Delta(function_call=function)
                return Delta(tool_calls=[ToolCallDelta(event.index, self.call_id(event), "function", function)])
            case CallArguments(index, text) if self._reported(index):
                function = FunctionDelta(arguments=text)
                if self.legacy:
                    return Delta(function_call=function)
                return Delta(tool_calls=[ToolCallDelta(index, function=function)])
            case _:
                return None

    def _reported(self, index: int) -> bool:
        return index == 0 or self.parallel

    def _count(self, chunk: Chunk) -> None:
        """Tokens whose text begins within the reasoning, however late the text became certain."""
        total, n = self.parser.reasoning_bytes, 0
        if total is None:
            return
        self._lengths += map(self.token_length, chunk.tokens)
        while n < len(self._lengths) and self._spent < total:
            self._spent += self._lengths[n]
            n += 1
        del self._lengths[:n]
        self.reasoning_tokens += n


def message_of(deltas: list[Delta]) -> Message:
    """What all ``deltas`` of a choice add up to."""
    content = _joined([delta.content for delta in deltas])
    reasoning = _joined([delta.reasoning for delta in deltas])
    calls: list[tuple[ToolCall, list[str]]] = []
    function: list[FunctionDelta] = []
    for delta in deltas:
        if isinstance(delta.function_call, FunctionDelta):
            function.append(delta.function_call)
        for call in delta.tool_calls or ():
            assert isinstance(call.function, FunctionDelta)
            if isinstance(call.id, str) and isinstance(call.function.name, str):
                calls.append((ToolCall(call.id, Function(call.function.name, "")), []))
            elif isinstance(call.function.arguments, str):
                calls[call.index][1].append(call.function.arguments)
    for made, texts in calls:
        made.function.arguments = "".join(texts)
    message = Message(content or (None if calls or function else ""))
    if reasoning:
        message.reasoning_content = message.reasoning = reasoning
    if calls:
        message.tool_calls = [made for made, _ in calls]
    if function:
        name = function[0].name
        assert isinstance(name, str)
        message.function_call = Function(name, _joined([piece.arguments for piece in function]))
    return message


def _joined(texts: list[str | UnsetType]) -> str:
    return "".join(text for text in texts if text is not UNSET and isinstance(text, str))
