"""A message as it grows: the events of its stream, and what they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bough.server.answers import ChatChunkChoice, Delta, FunctionDelta, ToolCallDelta, Usage
from bough.server.anthropic.schema import Block, MessagesRequest
from bough.server.errors import encode_json
from bough.server.messages import arguments_of

Event = dict[str, Any]


def encode_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


class Growing:
    """Takes the news of a chat's only choice. ``message`` is complete after :meth:`end`.

    ``enforced``: the input of calls is JSON for certain, so it is sent as it comes. Otherwise it is sent in one piece
    when it is whole: clients fail on JSON that turns out to be none.
    """

    def __init__(self, message_id: str, model: str, body: MessagesRequest, enforced: bool) -> None:
        self._body = body
        self._enforced = enforced
        self._pieces: list[str] = []
        self._reason: str | None = None
        self._matched: int | str | None = None
        self.message: dict[str, Any] = {
            "id": message_id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": None,
        }  # fmt: skip

    def begin(self, usage: Usage) -> list[Event]:
        self.message["usage"] = _usage(usage)
        return [{"type": "message_start", "message": {**self.message, "content": []}}, {"type": "ping"}]

    def take(self, choices: Sequence[ChatChunkChoice]) -> list[Event]:
        events: list[Event] = []
        for choice in choices:
            events += self._take(choice.delta)
            if isinstance(choice.parse_error, str):
                self.message["parse_error"] = choice.parse_error
            if choice.finish_reason is not None:
                self._reason = choice.finish_reason
                self._matched = choice.matched_stop if isinstance(choice.matched_stop, int | str) else None
        return events

    def end(self, usage: Usage, warnings: list[str], program: dict[str, Any] | None) -> list[Event]:
        """The chat has ended well; ``warnings`` name what of its constraint was not enforced.

        ``program`` is what its program and lease were granted.
        """
        message = self.message
        if warnings:
            message["warnings"] = warnings
        if program is not None:
            message["program"] = program
        events = self._close()
        message["stop_reason"] = self._stop_reason(usage)
        if message["stop_reason"] == "stop_sequence":
            message["stop_sequence"] = self._matched
        message["usage"] = _usage(usage, (program or {}).get("lease"))
        told = ("stop_reason", "stop_sequence", "parse_error", "warnings", "program")
        delta = {name: message[name] for name in told if name in message}
        return [
            *events, {"type": "message_delta", "delta": delta, "usage": message["usage"]}, {"type": "message_stop"}
        ]  # fmt: skip

    def _stop_reason(self, usage: Usage) -> str:
        if self._reason == "tool_calls":
            return "tool_use"
        if self._reason == "length":
            cut = usage.completion_tokens < self._body.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        return "stop_sequence" if self._matched in (self._body.stop_sequences or ()) else "end_turn"

    def _take(self, delta: Delta) -> list[Event]:
        events: list[Event] = []
        if isinstance(delta.reasoning, str) and delta.reasoning:
            shown = "" if self._body.thinking and self._body.thinking.display == "omitted" else delta.reasoning
            events += self._write("thinking", "thinking_delta", shown)
        if isinstance(delta.content, str) and delta.content:
            events += self._write("text", "text_delta", delta.content)
        for call in delta.tool_calls or ():
            events += self._call(call)
        return events

    def _call(self, call: ToolCallDelta) -> list[Event]:
        assert isinstance(call.function, FunctionDelta)
        events = []
        if isinstance(call.id, str):
            events += self._open({"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}})
        if isinstance(text := call.function.arguments, str) and text:
            if self._enforced:
                events.append(self._delta("input_json_delta", "partial_json", text))
            else:
                self._pieces.append(text)
        return events

    def _write(self, kind: str, delta: str, text: str) -> list[Event]:
        content, events = self.message["content"], []
        if not content or content[-1]["type"] != kind:
            block: Block = {"type": kind, kind: ""}
            events = self._open(block | {"signature": ""} if kind == "thinking" else block)
        return [*events, self._delta(delta, kind, text)] if text else events

    def _open(self, block: Block) -> list[Event]:
        events = self._close()
        content = self.message["content"]
        content.append(block)
        self._pieces = []
        return [*events, {"type": "content_block_start", "index": len(content) - 1, "content_block": dict(block)}]

    def _delta(self, kind: str, name: str, text: str) -> Event:
        self._pieces.append(text)
        return {
            "type": "content_block_delta",
            "index": len(self.message["content"]) - 1,
            "delta": {"type": kind, name: text},
        }

    def _close(self) -> list[Event]:
        """End the block that is open, if any."""
        content = self.message["content"]
        if not content:
            return []
        block, text = content[-1], "".join(self._pieces)
        stop = {"type": "content_block_stop", "index": len(content) - 1}
        if block["type"] != "tool_use":
            block[block["type"]] = text
            return [stop]
        block["input"] = arguments_of(text)
        if self._enforced or not block["input"]:
            return [stop]
        return [self._delta("input_json_delta", "partial_json", encode_json(block["input"]).decode()), stop]


def _usage(usage: Usage, lease: dict[str, Any] | None = None) -> dict[str, int]:
    """Tokens from the cache, and those that ``lease`` keeps there from now on, are not among the input tokens, as in
    Anthropic's usage."""
    cached = usage.prompt_tokens_details.cached_tokens
    created = max(0, lease["tokens"] - cached) if lease else 0
    return {
        "input_tokens": usage.prompt_tokens - cached - created,
        "output_tokens": usage.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
    }
