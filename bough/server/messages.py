"""Chat messages as clients send them, in the form that chat templates expect."""

from __future__ import annotations

from typing import Any

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
    content = message.get("content")
    if content is None and not (role == "assistant" and ("content" in message or message.get("tool_calls"))):
        raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
    return {**message, "role": _ROLES[role], "content": "" if content is None else _text_only(content, where)}


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


def check_tools(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> list[dict[str, Any]] | None:
    """The tools for the template. Raises InvalidRequest for forced calls and for what is not a function."""
    if choice not in (None, "auto", "none"):
        if choice == "required" and not tools:
            raise InvalidRequest("tool_choice is required, but there are no tools", param="tool_choice")
        raise InvalidRequest(
            "tool_choice other than auto and none is not supported yet by this version", param="tool_choice"
        )
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if tool.get("type") != "function" or not named:
            raise InvalidRequest(f"tools[{i}] must be a function with a name", param=f"tools[{i}]")
    return tools or None
