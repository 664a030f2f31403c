"""Tells reasoning between two tags from the answer behind it, while the text arrives."""

from __future__ import annotations

from bough.text.events import Content, Event, Reasoning
from bough.text.reader import Literals, Parse, literals
from bough.text.reasoning.families import ReasoningFormat
from bough.text.reasoning.splitter import Splitter
from bough.text.trim import Trimmer


class TagSplitter(Splitter):
    """Splitter of one answer.

    Args:
        form: the tags.
        started: whether the prompt left the reasoning open; None where the prompt is not known.
        triggers: beginnings of tool calls, which end the reasoning of some families.
    """

    def __init__(self, form: ReasoningFormat, started: bool | None, triggers: tuple[str, ...] = ()) -> None:
        self._form = form
        self._started = started
        self._triggers = triggers if form.ends_at_call else ()
        self._reasoning = Trimmer(leading=True)
        self._content = Trimmer(leading=False)
        super().__init__()

    def finish(self) -> list[Event]:
        events = super().finish()
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

    def _on_reasoning(self, text: str) -> None:
        self._count(text)
        if text := self._reasoning.push(text):
            self._events.append(Reasoning(text))

    def _on_content(self, text: str) -> None:
        if text := self._content.push(text):
            self._events.append(Content(text))
