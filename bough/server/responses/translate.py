"""From a request for a response to the chat that answers it: items become messages, fields change their names."""

from __future__ import annotations

from typing import Any

import msgspec

from bough.base.errors import InvalidRequest
from bough.server.dialect import renamed
from bough.server.options import new_id
from bough.server.responses.schema import INCLUDABLE, SAME_IN_CHAT, UNSUPPORTED_RESPONSES, ResponsesRequest
from bough.server.schema import ChatRequest, refuse_constraints, refuse_unsupported

Item = dict[str, Any]

_PARAMS = {
    "messages": "input", "prompt": "input", "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens", "response_format": "text.format", "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
}  # fmt: skip
"""Fields of chat completions that errors name -> the fields of this API that they came from."""


def check(body: ResponsesRequest) -> None:
    """Raises InvalidRequest for what this version cannot do."""
    refuse_unsupported(body, UNSUPPORTED_RESPONSES)
    refuse_constraints(body, ("response_format",), "text.format")
    if body.background and body.store is False:
        raise InvalidRequest("background needs store, which keeps the response until it is fetched", param="background")
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include can be {' and '.join(INCLUDABLE)}, not {name[:64]!r}", param="include")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


def input_items(body: ResponsesRequest) -> list[Item]:
    """The request's own input as items with ids, text content as parts. Raises InvalidRequest for what is no item."""
    if isinstance(body.input, str):
        return [_message({"role": "user", "content": body.input})]
    if not body.input:
        raise InvalidRequest("input is empty", param="input")
    items = []
    for i, given in enumerate(body.input):
        item = {name: value for name, value in given.items() if value is not None}
        kind = item.get("type", "message" if "role" in item else "item_reference" if "id" in item else None)
        _check_item(item, f"input[{i}]")
        if kind == "message":
            items.append(_message(item))
        elif kind in ("function_call", "function_call_output", "reasoning", "item_reference"):
            items.append({"id": new_id(f"{kind[:2]}_"), "status": "completed", **item, "type": kind})
        else:
            raise InvalidRequest(f"input[{i}]: items of the type {str(kind)[:64]!r} are not supported", param="input")
    return items


def _check_item(item: Item, where: str) -> None:
    """Raises InvalidRequest for ids that are no texts, and for reasoning that is not in parts."""
    for name in ("id", "call_id"):
        if not isinstance(item.get(name, ""), str):
            raise InvalidRequest(f"{where}.{name} must be text", param="input")
    if item.get("type") == "reasoning":
        for name in ("summary", "content"):
            if not isinstance(item.get(name, []), list):
                raise InvalidRequest(f"{where}.{name} must be a list of parts", param="input")


def _message(item: Item) -> Item:
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content, **({"annotations": []} if kind == "output_text" else {})}]
    return {"id": new_id("msg_"), "status": "completed", **item, "type": "message", "content": content}


def resolved(items: list[Item], history: list[Item]) -> list[Item]:
    """``items`` with references replaced by the items of ``history`` that they name."""
    by_id = {item["id"]: item for item in history}
    found = []
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            if item["id"] not in by_id:
                raise InvalidRequest(f"input[{i}] refers to an item that is not there", param="input")
            item = by_id[item["id"]]
        found.append(item)
    return found


def chat_request(body: ResponsesRequest, items: list[Item], rid: str) -> ChatRequest:
    """The chat that answers ``items``, known to the engine as ``rid``. Raises InvalidRequest in this API's names."""
    fields: dict[str, Any] = {name: value for name in SAME_IN_CHAT if (value := getattr(body, name)) is not None}
    fields["rid"] = rid
    fields["messages"] = messages(body.instructions, items)
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs or 0
    if body.tools:
        fields["tools"] = [_tool(tool, i) for i, tool in enumerate(body.tools)]
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    if body.text is not None and body.text.verbosity is not None:
        fields["verbosity"] = body.text.verbosity
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    try:
        return msgspec.convert(fields, ChatRequest)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = param_of(path.strip("`").removeprefix("$."))
        raise InvalidRequest(own_words(message), param=param) from None


def param_of(chat_param: str | None) -> str | None:
    """The field of this API that an error in the chat is about."""
    if chat_param is None:
        return None
    name = chat_param.partition("[")[0].partition(".")[0]
    return _PARAMS.get(name, chat_param.replace("].function.", "]."))


def own_words(message: str) -> str:
    """What an error in the chat says, in the names of this API."""
    return renamed(message, _PARAMS).replace("].function.", "].")


def messages(instructions: str | None, items: list[Item]) -> list[dict[str, Any]]:
    """Items as chat messages: calls join the assistant's message before them, reasoning the one behind it.

    Reasoning that was cut before it came to an answer is a message of its own.
    """
    found: list[dict[str, Any]] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    thought = ""
    for i, item in enumerate(items):
        kind = item["type"]
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            thought += "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
            continue
        if kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(_call(item, i))
        else:
            if thought and item.get("role") != "assistant":
                found.append({"role": "assistant", "content": None, "reasoning_content": thought})
                thought = ""
            found.append({"role": item.get("role"), "content": item.get("content")})
        if thought and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"] = found[-1].get("reasoning_content", "") + thought
            thought = ""
    return found


def _call(item: Item, i: int) -> dict[str, Any]:
    name, arguments = item.get("name"), item.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise InvalidRequest(f"input[{i}] must have a name and arguments", param="input")
    return {"id": item.get("call_id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: dict[str, Any], i: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"tools[{i}]: only functions are supported, not {str(tool.get('type'))[:64]!r}", param=f"tools[{i}]"
        )
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """``choice`` with what it says of functions and of allowed tools an object of its own, as in chats."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return _named(choice)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = {"mode": choice.get("mode"), "tools": [_named(tool) for tool in choice["tools"]]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(tool: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name") if isinstance(tool, dict) else None}}


def _response_format(wanted: dict[str, Any]) -> dict[str, Any]:
    if wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
