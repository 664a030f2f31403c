"""How each API words what goes wrong, and frames its streams."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bough.base.errors import BoughError
from bough.server.errors import encode_json, error_body, error_event

EVENTS = b"text/event-stream; charset=utf-8"
LINES = b"application/x-ndjson"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API's way to speak where its handlers are not asked.

    Attributes:
        error: body of a response that refuses or fails.
        last_error: how a stream that has begun ends with an error.
        streams: content type of its streams.
    """

    error: Callable[[BoughError], bytes]
    last_error: Callable[[BoughError], bytes]
    streams: bytes = EVENTS


_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


_ANTHROPIC_FIELDS = {
    "max_completion_tokens": "max_tokens", "response_format.json_schema": "output_config.format",
    "response_format.": "output_config.format.",
}  # fmt: skip
_OLLAMA_FIELDS = {
    "max_completion_tokens": "options.num_predict", "max_tokens": "options.num_predict",
    "response_format.json_schema": "format", "response_format.": "format.",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop",
                                            "presence_penalty", "frequency_penalty")},
}  # fmt: skip
"""Fields of chat completions -> those of the API that they came from; a field that was refused keeps its name."""


def renamed(message: str, fields: Mapping[str, str]) -> str:
    """``message`` about a chat, as one about the ``fields`` that it was made from.

    A name that is an ordinary word is one where the message begins with it, or where a path follows it; of messages
    the number is left out, which was counted in the chat.
    """
    for name, own in fields.items():
        edge = r"(?<![\w.])" if "_" in name else r"(?:(?<![\w.])(?=\w+[.\[])|^)"
        path = "" if name.endswith(".") else r"\b(?:\[\d+\]|\.json_schema)?(?:\.schema)?"
        message = re.sub(f"{edge}{re.escape(name)}{path}", own, message)
    return message


def _anthropic(error: BoughError) -> bytes:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    message = renamed(error.message, _ANTHROPIC_FIELDS).replace("].function.parameters", "].input_schema")
    return encode_json({"type": "error", "error": {"type": kind, "message": message.replace("].function.", "].")}})


def _ollama(error: BoughError) -> bytes:
    return encode_json({"error": renamed(error.message, _OLLAMA_FIELDS)})


OPENAI = Dialect(error_body, lambda error: error_event(error) + DONE)
ANTHROPIC = Dialect(_anthropic, lambda error: b"event: error\ndata: %b\n\n" % _anthropic(error))
OLLAMA = Dialect(_ollama, lambda error: _ollama(error) + b"\n", LINES)


def dialect_of(path: str) -> Dialect:
    """How whoever asks for ``path``, which is no route, would have been answered there."""
    return ANTHROPIC if path.startswith("/v1/messages") else OLLAMA if path.startswith("/api/") else OPENAI
