"""The response object as it grows, and the events that say how.

One :class:`Growing` serves streams, answers in one piece and background responses: it turns the news of a chat
into output items, and each change of them into the events that OpenAI's clients rebuild the response from.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from bough.base.errors import BoughError
from bough.server.answers import ChatChunkChoice, Usage
from bough.server.errors import encode_json
from bough.server.options import new_id
from bough.server.responses.schema import ResponsesRequest
from bough.text.tools.values import is_object

Event = dict[str, Any]

_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


def new_response(body: ResponsesRequest, model: str, created: int) -> dict[str, Any]:
    """A response of which nothing has been generated."""
    reasoning = body.reasoning
    return {
        "id": new_id("resp_"),
        "object": "response",
        "created_at": created,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text is not None else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def encode_event(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


class Growing:
    """A response and its events so far. Events refer to the response itself: encode them before the next call."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self._number = 0
        self._open: dict[str, Any] | None = None
        self._call: int | None = None
        self._reason: str | None = None
        self._logprobs: list[Any] = []
        """Of tokens whose text is held back, or is the end of reasoning or of a call, which have none."""

    def begin(self) -> list[Event]:
        events = [self._event("created", response=self.response)]
        if self.response["status"] == "queued":
            events.append(self._event("queued", response=self.response))
        return events

    def run(self) -> list[Event]:
        self.response["status"] = "in_progress"
        return [self._event("in_progress", response=self.response)]

    def take(self, choices: list[ChatChunkChoice]) -> list[Event]:
        """What the news of the chat's one choice change."""
        events: list[Event] = []
        for choice in choices:
            delta = msgspec.to_builtins(choice.delta)
            logprobs = [] if choice.logprobs is None else msgspec.to_builtins(choice.logprobs.content)
            if text := delta.get("content"):
                logprobs, self._logprobs = self._logprobs + logprobs, []
                if self._open is None or self._open["type"] != "message":
                    logprobs = _from_text(logprobs, text)
                events += self._grow("message", text, logprobs)
            elif text := delta.get("reasoning_content"):
                self._logprobs = logprobs
                events += self._grow("reasoning", text, [])
            elif calls := delta.get("tool_calls"):
                self._logprobs = []
                for call in calls:
                    events += self._grow_call(call)
                self._logprobs = logprobs
            else:
                self._logprobs += logprobs
            self._reason = choice.finish_reason or self._reason
            if isinstance(choice.parse_error, str):
                self.response["parse_error"] = choice.parse_error
        return events

    def end(self, usage: Usage, warnings: list[str], program: dict[str, Any] | None) -> list[Event]:
        """The chat has ended well; ``warnings`` name what of its constraint was not enforced.

        ``program`` is what its program and lease were granted.
        """
        events: list[Event] = []
        if not self.response["output"] and self._open is None:
            events += self._begin_text("message")
        cut = self._reason == "length"
        status = "incomplete" if cut else "completed"
        events += self._close(status)
        self.response["status"] = status
        self.response["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        self.response["completed_at"] = None if cut else int(time.time())
        self.response["usage"] = response_usage(usage)
        if warnings:
            self.response["warnings"] = warnings
        if program is not None:
            self.response["program"] = program
        return [*events, self._event(status, response=self.response)]

    def fail(self, error: BoughError) -> list[Event]:
        """The chat has ended badly; what was generated stays."""
        self._close("incomplete")
        self.response["status"] = "failed"
        code = _FAILURES.get(error.status, "server_error")
        self.response["error"] = {"code": code, "message": error.message, "param": error.param}
        return [self._event("failed", response=self.response)]

    def cancel(self) -> None:
        self._close("incomplete")
        self.response["status"] = "cancelled"

    def _grow(self, kind: str, text: str, logprobs: list[Any]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            events = [*self._close("completed"), *self._begin_text(kind)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [*events, self._part_event("reasoning_text.delta", delta=text)]
        part["logprobs"] += logprobs
        return [*events, self._part_event("output_text.delta", delta=text, logprobs=logprobs)]

    def _begin_text(self, kind: str) -> list[Event]:
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item: dict[str, Any] = {"id": new_id("rs_"), "type": kind, "summary": []}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg_"), "type": kind, "role": "assistant"}
        self._open = {**item, "status": "in_progress", "content": []}
        self.response["output"].append(self._open)
        added = self._item_event("added")
        # The part is announced by an event of its own, behind that of the item, which is still without it.
        added["item"] = {**self._open, "content": []}
        self._open["content"].append(part)
        return [added, self._part_event("content_part.added", part=dict(part))]

    def _grow_call(self, call: dict[str, Any]) -> list[Event]:
        events: list[Event] = []
        function = call.get("function") or {}
        if self._open is None or self._open["type"] != "function_call" or self._call != call["index"]:
            events = self._close("completed")
            self._call = call["index"]
            self._open = {
                "id": new_id("fc_"), "type": "function_call", "status": "in_progress", "call_id": call.get("id"),
                "name": function.get("name"), "arguments": "",
            }  # fmt: skip
            self.response["output"].append(self._open)
            added = self._item_event("added")
            added["item"] = dict(self._open)
            events.append(added)
        if text := function.get("arguments"):
            self._open["arguments"] += text
            events.append(self._item_part("function_call_arguments.delta", delta=text))
        return events

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "function_call":
            name, text = item["name"], item["arguments"]
            if not is_object(text):
                item["status"] = "incomplete"
            events.append(self._item_part("function_call_arguments.done", name=name, arguments=text))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
                self._logprobs = []
                events.append(self._part_event("output_text.done", text=part["text"], logprobs=part["logprobs"]))
            else:
                events.append(self._part_event("reasoning_text.done", text=part["text"]))
            events.append(self._part_event("content_part.done", part=part))
        events.append(self._item_event("done"))
        self._open = None
        return events

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _item_event(self, name: str) -> Event:
        index = len(self.response["output"]) - 1
        return self._event(f"output_item.{name}", output_index=index, item=self._open)

    def _item_part(self, kind: str, /, **fields: Any) -> Event:
        assert self._open is not None
        index = len(self.response["output"]) - 1
        return self._event(kind, item_id=self._open["id"], output_index=index, **fields)

    def _part_event(self, kind: str, /, **fields: Any) -> Event:
        return self._item_part(kind, content_index=0, **fields)


def _from_text(logprobs: list[Any], text: str) -> list[Any]:
    """``logprobs`` from the token on with which ``text`` begins: those before it were of a mark or of white space."""
    pieces = [bytes(entry["bytes"]) for entry in logprobs]
    at = b"".join(pieces).rfind(text.encode())
    first = 0
    while at > 0 and at >= len(pieces[first]):
        at -= len(pieces[first])
        first += 1
    return logprobs[first:]


def response_usage(usage: Usage) -> dict[str, Any]:
    """Usage in the names of this API; what was not cached before is cached now."""
    counted = msgspec.to_builtins(usage)
    cached = usage.prompt_tokens_details.cached_tokens
    reasoning = (counted.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage.prompt_tokens - cached},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.total_tokens,
    }
