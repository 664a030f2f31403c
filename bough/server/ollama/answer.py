"""What a chat says, in Ollama's words: lines of a stream, or one object."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from bough.server.answers import ChatChunkChoice, FunctionDelta, ToolCallDelta, Usage
from bough.server.messages import arguments_of

NANO = 1_000_000_000


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class Said:
    """What some news adds to an answer."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def add(self, other: Said) -> None:
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


class Teller:
    """Tells one chat's news, and at its end how long all of it took. ``started`` is of ``time.perf_counter``."""

    def __init__(self, model: str, kind: Literal["chat", "generate"], started: float) -> None:
        self._model = model
        self._kind = kind
        self._started = started
        self._read: float | None = None
        self._reason = "stop"
        self._trouble: dict[str, str] = {}
        self._calls: list[tuple[str, str, list[str]]] = []

    def take(self, choices: Sequence[ChatChunkChoice]) -> Said:
        """The news in ``choices``. A call is news when it is complete."""
        if self._read is None:
            self._read = time.perf_counter()
        said = Said()
        for choice in choices:
            delta = choice.delta
            if isinstance(delta.content, str) and delta.content:
                said.calls += self._complete()
                said.content += delta.content
            if isinstance(delta.reasoning, str):
                said.thinking += delta.reasoning
            for call in delta.tool_calls or ():
                said.calls += self._call(call)
            if choice.logprobs is not None:
                said.logprobs += choice.logprobs.content
            if choice.finish_reason is not None:
                said.calls += self._complete()
                self._reason = "length" if choice.finish_reason == "length" else "stop"
            if isinstance(choice.parse_error, str):
                self._trouble = {"parse_error": choice.parse_error}
        return said

    def _call(self, call: ToolCallDelta) -> list[dict[str, Any]]:
        assert isinstance(call.function, FunctionDelta)
        done = []
        if isinstance(call.id, str) and isinstance(call.function.name, str):
            done = self._complete()
            self._calls.append((call.id, call.function.name, []))
        if isinstance(call.function.arguments, str):
            self._calls[-1][2].append(call.function.arguments)
        return done

    def _complete(self) -> list[dict[str, Any]]:
        done = [
            {"id": made, "function": {"name": name, "arguments": arguments_of("".join(pieces))}}
            for made, name, pieces in self._calls
        ]
        self._calls = []
        return done

    def line(self, said: Said, *, done: bool = False) -> dict[str, Any]:
        """An object that tells ``said``."""
        line: dict[str, Any] = {"model": self._model, "created_at": now()}
        if self._kind == "generate":
            line["response"] = said.content
            if said.thinking:
                line["thinking"] = said.thinking
        else:
            line["message"] = {"role": "assistant", "content": said.content}
            if said.thinking:
                line["message"]["thinking"] = said.thinking
            if said.calls:
                line["message"]["tool_calls"] = said.calls
        if said.logprobs:
            line["logprobs"] = said.logprobs
        return line | {"done": done}

    def last(
        self, said: Said, usage: Usage | None, warnings: Sequence[str] = (), program: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The object that ends the answer; without ``usage`` nothing was asked but that the model be loaded.

        ``warnings`` name what of its constraint was not enforced, ``program`` is what its program was granted.
        """
        line = self.line(said, done=True)
        if usage is None:
            return line | {"done_reason": "load"}
        ended = time.perf_counter()
        read = ended if self._read is None else self._read
        return line | {
            "done_reason": self._reason,
            **self._trouble,
            **({"warnings": list(warnings)} if warnings else {}),
            **({"program": program} if program is not None else {}),
            "total_duration": int((ended - self._started) * NANO),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int((read - self._started) * NANO),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((ended - read) * NANO),
        }
