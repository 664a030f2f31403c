"""What the splitters of reasoning have in common: pieces of text in, events out."""

from __future__ import annotations

from bough.text.events import Event
from bough.text.reader import Parse, Reader


class Splitter:
    """Tells the reasoning in one answer from the rest, while the text arrives.

    Attributes:
        n_bytes: how much of the text, in UTF-8, was reasoning and its marks.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self._reader = Reader()
        self._events: list[Event] = []
        self._running = self._run()

    def push(self, text: str) -> list[Event]:
        """Take a further piece of the text; what became certain with it."""
        self._reader.push(text)
        next(self._running, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The text has ended; the rest of what it says."""
        self._reader.ended = True
        return self.push("")

    def _run(self) -> Parse:
        """Reads the text, yielding where it needs more of it, and leaves what it finds in ``_events``."""
        raise NotImplementedError

    def _count(self, text: str) -> None:
        self.n_bytes += len(text.encode("utf-8", "surrogatepass"))
