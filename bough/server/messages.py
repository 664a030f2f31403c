"""Chat messages as clients send them, in the form that chat templates expect."""

from __future__ import annotations

from typing import Any

import msgspec

from bough.base.errors import InvalidRequest
from bough.base.limits import Limits

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
_MEDIA = ("image_url", "image", "input_image", "input_audio", "audio_url", "video_url", "video", "file")


def normalise_messages(messages: list[dict[str, Any]], limits: Limits) -> list[dict[str, Any]]:
    """New messages whose content is a text, or a list of text parts, and whose roles templates know.

    ``developer`` is what newer models call ``system``. Raises InvalidRequest that names the message.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.messages:
        raise InvalidRequest(f"at most {limits.messages} messages are allowed", param="messages")
    return [_normalise(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    message = _with_calls(message, where)
    content = message.get("content")
    if content is None and role == "assistant":  # what a client keeps of an answer that was refused
        content = message.get("refusal")
    if content is None and not (role == "assistant" and ("content" in message or message.get("tool_calls"))):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    if (reasoning := message.get("reasoning")) is not None:  # as templates call it
        message = {"reasoning_content": reasoning, **message}
    return {**message, "role": _ROLES[role], "content": "" if content is None else _text_only(content, where)}


def _with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """``message`` with its calls checked and their arguments as objects; that of the older ``function_call`` too."""
    if (old := message.get("function_call")) is not None:
        message = {key: value for key, value in message.items() if key != "function_call"}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": old}]
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    made = []
    for i, call in enumerate(calls):
        at = f"{where}.tool_calls[{i}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{at} must be a function with a name", param=at)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = arguments_of(arguments)
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{at}.function.arguments must be the JSON of an object", param=f"{at}.function")
        made.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": made}


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut off or that the model wrote badly, their text.

    What was answered so is also how it is read again: nobody's conversation ends with a call that went wrong.
    """
    try:
        found = msgspec.json.decode(text if text.strip() else "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"raw_arguments": text}


def _text_only(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}.content must be text or a list of parts", param=f"{where}.content")
    parts = []
    for i, part in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise InvalidRequest(f"{at}: {kind} is not supported yet by this version", param=at)
        text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{at} must be a part of type text", param=at)
        parts.append({"type": "text", "text": text})
    return parts
