"""How each API words what goes wrong, and frames its streams."""

from __future__ import annotations

from collections.abc import Callable
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


def _anthropic(error: BoughError) -> bytes:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ANTHROPIC_TYPES.get(error.status, other)
    return encode_json({"type": "error", "error": {"type": kind, "message": error.message}})


def _ollama(error: BoughError) -> bytes:
    return encode_json({"error": error.message})


OPENAI = Dialect(error_body, lambda error: error_event(error) + DONE)
ANTHROPIC = Dialect(_anthropic, lambda error: b"event: error\ndata: %b\n\n" % _anthropic(error))
OLLAMA = Dialect(_ollama, lambda error: _ollama(error) + b"\n", LINES)


def dialect_of(path: str) -> Dialect:
    """How whoever asks for ``path``, which is no route, would have been answered there."""
    return ANTHROPIC if path.startswith("/v1/messages") else OLLAMA if path.startswith("/api/") else OPENAI
