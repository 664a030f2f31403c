"""A backend that is made on a thread: reading a large vocabulary takes seconds, and a start waits for a part of it.

The longest parts, to read the tokens and to slice them, keep Python's lock for as long as they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from bough.base.constraint import Constraint
from bough.base.errors import BoughError
from bough.base.plan import Ints
from bough.grammar.base import Backend, Matcher, Template


class LazyBackend:
    """A :class:`bough.grammar.base.Backend` over one that is still being made."""

    def __init__(self, making: Future[Backend]) -> None:
        self._making = making

    def compile(self, constraint: Constraint) -> Template:
        """Waits for the backend; raises BoughError where it cannot be made, too."""
        try:
            backend = self._making.result()
        except Exception as error:
            raise BoughError(f"this model's answers cannot be constrained: {error}") from error
        return backend.compile(constraint)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        self._making.result().fill(matchers, bits)

    def close(self) -> None:
        if self._making.done() and self._making.exception() is None:
            self._making.result().close()
