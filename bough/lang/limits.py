"""What a program may use, and how often a call is tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one run of a program with all its forks; None is no bound.

    Attributes:
        tokens: generated tokens. A call that could pass it is shortened; one that finds nothing left fails. Where the
            backend keeps no budgets, what calls under way may generate is set aside, and others wait for it.
        seconds: from the start of the run; a call that is under way then is stopped.
        calls: of the model.
    """

    tokens: int | None = None
    seconds: float | None = None
    calls: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Repetition of calls that failed for a reason that may pass: no connection, HTTP 408, 429 and 5xx, a timeout.

    Attributes:
        attempts: in all; 1 never repeats.
        delay: seconds before the second attempt, doubled before each further one; what a server asks for is obeyed.
        timeout: seconds that one attempt may take.
    """

    attempts: int = 3
    delay: float = 0.5
    timeout: float | None = None
