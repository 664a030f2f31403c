"""What goes wrong in a program, as the one who wrote it sees it."""

from __future__ import annotations

from bough.base.errors import BoughError


class ProgramError(BoughError, KeyError):
    """A call of a program failed; its ``__cause__`` says why.

    It is raised where the result is wanted. Programs that were written for SGLang got a bare KeyError there.
    """

    code = "program_error"

    def __str__(self) -> str:
        return self.message


class LimitExceeded(ProgramError):
    """A program used up one of its :class:`bough.lang.limits.Limits`."""

    code = "limit_exceeded"


class Cancelled(ProgramError):
    """A program was cancelled before this call was done."""

    code = "cancelled"


class InvalidAnswer(ProgramError, ValueError):
    """What the model wrote is not of the type that was asked for, and no attempt is left.

    Attributes:
        reason: what is wrong with it.
        written: what the model wrote.
    """

    code = "invalid_answer"

    def __init__(self, reason: str, written: str) -> None:
        super().__init__(f"the answer {written[:200]!r} is not valid: {reason}")
        self.reason = reason
        self.written = written


class Unsupported(NotImplementedError):
    """A backend cannot do what a program asks of it."""


class BackendError(RuntimeError):
    """A server refused a request or cannot be reached; ``args[0]`` is what it said, decoded where it is JSON.

    Attributes:
        status: of the answer; 0 where there was none.
        retry_after: seconds that the server asks to wait; None where it does not say.
    """

    def __init__(self, content: object, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(content)
        self.status = status
        self.retry_after = retry_after

    @property
    def transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in (0, 408, 429, 502, 503, 504)
