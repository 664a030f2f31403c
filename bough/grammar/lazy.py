"""A backend that is made when it is asked for, or before, while the engine has nothing to do.

Reading a large vocabulary takes seconds. The longest parts, to read the tokens and to slice them, keep Python's lock
for as long as they take, so a start that had them done on a thread would wait for them all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Lock

from bough.base.constraint import Constraint
from bough.base.errors import BoughError
from bough.base.plan import Ints
from bough.grammar.base import Backend, Matcher, Template


class LazyBackend:
    """A :class:`bough.grammar.base.Backend` over one that ``make`` makes, once."""

    def __init__(self, make: Callable[[], Backend]) -> None:
        self._make = make
        self._made: Future[Backend] = Future()
        self._making = Lock()

    def read(self) -> None:
        """Make it, or wait for who does. Never raises; any thread may."""
        with self._making:
            if not self._made.done():
                try:
                    self._made.set_result(self._make())
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    self._made.set_exception(error)

    def compile(self, constraint: Constraint) -> Template:
        """Waits for the backend; raises BoughError where it cannot be made, too."""
        self.read()
        if (error := self._made.exception()) is not None:
            raise BoughError(f"this model's answers cannot be constrained: {error}") from error
        return self._made.result().compile(constraint)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        self._made.result().fill(matchers, bits)

    def close(self) -> None:
        if self._made.done() and self._made.exception() is None:
            self._made.result().close()
