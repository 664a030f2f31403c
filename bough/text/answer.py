"""One answer as its text arrives: reasoning, content and tool calls, each told from the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.text.events import Content, Event, Reasoning, merge_events
from bough.text.reasoning.channels import ChannelSplitter
from bough.text.reasoning.families import ReasoningFormat
from bough.text.reasoning.tags import TagSplitter
from bough.text.tools.families import GPT_OSS
from bough.text.tools.format import Family
from bough.text.tools.parser import ToolParser

Tools = Mapping[str, Mapping[str, Any]]


class AnswerParser:
    """Parser of one answer.

    Args:
        reasoning: how the model marks its reasoning; None leaves it in the content.
        family: how the model writes tool calls; None leaves them in the content.
        tools: the functions that may be called, by name, with the JSON Schema of their parameters; None for any.
        started: whether the prompt left the reasoning open; None where the prompt is not known.
        hold_reasoning: report the reasoning in one piece, when it is complete.
        final_only: of a model that answers on channels, the content is what it says on the channel of answers.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        family: Family | None = None,
        tools: Tools | None = None,
        *,
        started: bool | None = None,
        hold_reasoning: bool = False,
        final_only: bool = False,
    ) -> None:
        self._splitter: TagSplitter | ChannelSplitter | None = None
        if family is GPT_OSS or (reasoning is not None and reasoning.channels):
            self._splitter = ChannelSplitter(final_only=final_only, calls=family is not None, started=started)
        elif reasoning is not None:
            self._splitter = TagSplitter(reasoning, started, () if family is None else family.triggers)
        self._separate = reasoning is not None
        self._parser = None if family is None else ToolParser(family, tools)
        self._hold = hold_reasoning
        self._held: list[Event] = []

    @property
    def reasoning_bytes(self) -> int | None:
        """How much of the text so far, in UTF-8, was reasoning and its marks; None where none is told apart."""
        return None if self._splitter is None or not self._separate else self._splitter.n_bytes

    def push(self, text: str) -> list[Event]:
        """Take a further piece of the text; what became certain with it."""
        if self._splitter is not None:
            return self._read(self._splitter.push(text))
        return [Content(text)] if self._parser is None else self._read([Content(text)])

    def finish(self) -> list[Event]:
        """The text has ended; the rest of what it says."""
        events = self._read(self._splitter.finish()) if self._splitter is not None else []
        if self._parser is not None:
            events = [*events, *self._release(self._parser.finish())]
        return merge_events([*events, *self._release([])])

    def _read(self, events: list[Event]) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                if not self._separate:
                    read.append(Content(event.text))
                elif self._hold:
                    self._held.append(event)
                else:
                    read.append(event)
            elif isinstance(event, Content) and self._parser is not None:
                read += self._release(self._parser.push(event.text))
            else:
                read += self._release([event])
        return merge_events(read)

    def _release(self, events: list[Event]) -> list[Event]:
        """``events`` behind the reasoning that was held back."""
        held, self._held = self._held, []
        return merge_events([*held, *events])


def parse_answer(parser: AnswerParser, text: str) -> list[Event]:
    """All that a complete ``text`` says."""
    return merge_events([*parser.push(text), *parser.finish()])
