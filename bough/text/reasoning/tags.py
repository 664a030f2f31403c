"""Tells reasoning between two tags from the answer behind it, while the text arrives."""

from __future__ import annotations

from bough.text.events import Content, Event, Reasoning
from bough.text.reader import Literals, Parse, Reader, literals
from bough.text.reasoning.families import ReasoningFormat
from bough.text.trim import Trimmer


class TagSplitter:
    """Splitter of one answer.

    Args:
        form: the tags.
        started: whether the prompt left the reasoning open; None where the prompt is not known.
        triggers: beginnings of tool calls, which end the reasoning of some families.

    Attributes:
        n_bytes: how much of the text, in UTF-8, was reasoning and its tags.
    """

    def __init__(self, form: ReasoningFormat, started: bool | None, triggers: tuple[str, ...] = ()) -> None:
        self._form = form
        self._started = started
        self._triggers = triggers if form.ends_at_call else ()
        self._reader = Reader()
        self._reasoning = Trimmer(leading=True)
        self._content = Trimmer(leading=False)
        self._events: list[Event] = []
        self._running = self._run()
        self.n_bytes = 0

    def push(self, text: str) -> list[Event]:
        """Take a further piece of the text; what became certain with it."""
        self._reader.push(text)
        next(self._running, None)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The text has ended; the rest of what it says."""
        self._reader.ended = True
        events = self.push("")
        return [*events, Content(held)] if (held := self._content.release()) else events

    def _run(self) -> Parse:
        reader, form = self._reader, self._form
        reader.mark()
        opened = yield from reader.choice((form.opens,))
        before = reader.unmark()
        if self._started or opened or (self._started is None and form.assumed):
            self._count(before)
            found = yield from reader.until(literals(form.closes, *self._triggers), self._on_reasoning)
            self._count(found or "")
            self._content.edge()
            before = found if found in self._triggers else ""
        self._on_content(before or "")
        yield from reader.until(Literals(()), self._on_content)

    def _count(self, text: str) -> None:
        self.n_bytes += len(text.encode("utf-8", "surrogatepass"))

    def _on_reasoning(self, text: str) -> None:
        self._count(text)
        if text := self._reasoning.push(text):
            self._events.append(Reasoning(text))

    def _on_content(self, text: str) -> None:
        if text := self._content.push(text):
            self._events.append(Content(text))
