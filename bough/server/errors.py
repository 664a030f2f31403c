"""One shape for every error that leaves over HTTP, and the errors that only the HTTP edge can raise.

The body nests ``error`` as OpenAI's clients unwrap it and repeats the same fields at the top level, where
clients of other servers look for them.
"""

from __future__ import annotations

import math

import msgspec

from bough.base.errors import BoughError, InvalidRequest, Overloaded
from bough.base.messages import Finish
from bough.engine.text import error_of

encode_json = msgspec.json.Encoder().encode


class TooLarge(InvalidRequest):
    """The body is larger than ``limits.body_bytes`` (HTTP 413)."""

    status = 413
    code = "body_too_large"


class UnsupportedMedia(InvalidRequest):
    """The body is compressed or not JSON (HTTP 415)."""

    status = 415
    code = "unsupported_media_type"


class BodyTimeout(InvalidRequest):
    """The body did not arrive in time (HTTP 408)."""

    status = 408
    code = "body_timeout"


class HeadersTooLarge(InvalidRequest):
    """The head of the request is over ``limits.header_bytes`` or ``limits.header_count`` (HTTP 431)."""

    status = 431
    code = "headers_too_large"


class MethodNotAllowed(InvalidRequest):
    """The path exists, with another method (HTTP 405)."""

    status = 405
    code = "method_not_allowed"


class Unauthorized(BoughError):
    """No key, or one that is not known (HTTP 401)."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(BoughError):
    """The key is known, but not for this (HTTP 403)."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class QuotaExceeded(Overloaded):
    """The tenant has as much in flight as it may (HTTP 429)."""

    code = "quota_exceeded"


class ModelNotFound(BoughError):
    """The request names a model that is not served (HTTP 404)."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Aborted(BoughError):
    """The request was aborted while it ran (HTTP 400, which clients neither retry nor wonder at)."""

    status = 400
    type = "aborted_error"
    code = "aborted"

    def __init__(self, message: str, usage: object = None) -> None:
        """``usage`` is what the request had used, where that is known."""
        super().__init__(message)
        self.usage = usage


def finish_error(finish: Finish, usage: object = None) -> BoughError:
    """The end of a sequence that is neither ``stop`` nor ``length``, as an error; of an abort it has the ``usage``."""
    if finish.kind == "abort":
        return Aborted(finish.message or "the request was aborted", usage)
    return error_of(finish)


def error_fields(error: BoughError) -> dict[str, object]:
    """The JSON object of ``error``: nested for OpenAI's clients, flat for the others."""
    nested: dict[str, object] = {
        "message": error.message, "type": error.type, "param": error.param, "code": error.code,
    }  # fmt: skip
    if isinstance(error, Aborted) and error.usage is not None:
        nested["usage"] = error.usage
    return {
        "error": nested,
        "object": "error",
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code if error.code is not None else error.status,
    }


def error_body(error: BoughError) -> bytes:
    return encode_json(error_fields(error))


def error_event(error: BoughError) -> bytes:
    """``error`` as a server-sent event, for streams that have begun."""
    return b"data: %b\n\n" % error_body(error)


def retry_headers(error: BoughError) -> list[tuple[bytes, bytes]]:
    """``Retry-After`` (whole seconds, at least 1) for the statuses that clients retry; how to send a key for 401.

    Clients also retry 408, where a request whose own time is over would only run again.
    """
    if error.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if error.status == 408 and not isinstance(error, BodyTimeout):
        return [(b"x-should-retry", b"false")]
    if error.status not in (429, 503):
        return []
    seconds = getattr(error, "retry_after", 1.0)
    return [(b"retry-after", str(max(1, math.ceil(seconds))).encode())]
