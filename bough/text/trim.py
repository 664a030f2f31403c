"""White space at the edges of a text that arrives in pieces."""

from __future__ import annotations


class Trimmer:
    """Passes text on, but keeps white space back for as long as it may be at an edge.

    Args:
        leading: white space at the beginning is dropped.
    """

    def __init__(self, *, leading: bool) -> None:
        self._leading = leading
        self._held: list[str] = []

    def push(self, text: str) -> str:
        """The part of what was pushed that is certainly not at an edge."""
        if self._leading:
            text = text.lstrip()
            if not text:
                return ""
            self._leading = False
        body = text.rstrip()
        passed = "".join((*self._held, body)) if body else ""
        if body:
            self._held = []
        if len(body) < len(text):
            self._held.append(text[len(body) :])
        return passed

    def edge(self) -> None:
        """Here is an edge: white space before and after it is dropped."""
        self._held = []
        self._leading = True

    def release(self) -> str:
        """The white space that is kept back, which is text after all."""
        held, self._held = "".join(self._held), []
        return held
