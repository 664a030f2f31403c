"""Exceptions that carry everything a client or an operator needs to know.

Every error that can reach a client derives from :class:`BoughError` and has an HTTP status, an OpenAI
error ``type`` and ``code``, and, where one field is to blame, its name in ``param``.
"""

from __future__ import annotations


class BoughError(Exception):
    """Base of all errors that bough raises on purpose."""

    status = 500
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(BoughError):
    """The configuration, or the model folder that it names, cannot be served."""


class InvalidRequest(BoughError):
    """The request is wrong and will stay wrong (HTTP 400)."""

    status = 400
    type = "invalid_request_error"


def program_cancelled(id: str) -> InvalidRequest:
    """What a request is refused with whose program was cancelled a moment ago."""
    return InvalidRequest(f"the program {id!r} was cancelled", param="program.id", code="program_cancelled")


class NotFound(BoughError):
    """The request names something that does not exist (HTTP 404)."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Overloaded(BoughError):
    """The bounded queue is full (HTTP 429); ``retry_after`` is in seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(BoughError):
    """The server is draining, starting or has lost its engine (HTTP 503)."""

    status = 503
    type = "service_unavailable"
    code = "unavailable"

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(BoughError):
    """The request ran past its own timeout (HTTP 408)."""

    status = 408
    type = "timeout_error"
    code = "timeout"


class EngineError(BoughError):
    """The engine failed while it computed this request (HTTP 500); other requests go on."""

    code = "engine_error"


class DeviceLost(BoughError):
    """The device cannot be used by this process any more; only a new process can."""

    code = "device_lost"
