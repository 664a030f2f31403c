"""The terms in which families describe how they write tool calls.

A call is a sequence of parts: literal text, the function's name, its arguments. White space in a literal is written
as it stands and read as optional.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.text.tools.values import Notation


@dataclass(frozen=True, slots=True)
class Name:
    """The name of the function."""


@dataclass(frozen=True, slots=True)
class Serial:
    """The number of the call within the conversation, as part of the family's ids."""


@dataclass(frozen=True, slots=True)
class CallId:
    """The model's own id of the call, with ``before`` it; optional when read, not written."""

    before: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """All arguments in one piece: a JSON object, or what ``notation`` says."""

    notation: Notation | None = None


@dataclass(frozen=True, slots=True)
class Envelope:
    """A JSON object that holds name and arguments, in any order when read."""

    arguments: str = "arguments"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Each argument by itself: ``before`` name ``between`` text ``after``.

    A newline at the end of ``between`` and at the beginning of ``after`` is not part of the text.
    """

    before: str
    between: str
    after: str


Part = str | Name | Serial | CallId | Arguments | Envelope | Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write calls.

    Attributes:
        opens: what begins a section of calls; empty when only ``bare`` sections exist.
        closes: what ends it; optional when read, as it may have been the end of the sequence.
        brackets: around the calls of a section.
        call: the parts of a call.
        separator: between the calls of a section; None when a section has one call.
        bare: an answer may begin with the calls, without ``opens``.
        between: between sections.
    """

    opens: str
    call: tuple[Part, ...]
    closes: str = ""
    brackets: tuple[str, str] = ("", "")
    separator: str | None = None
    bare: bool = False
    between: str = ""

    @property
    def trigger(self) -> str:
        """The text by which a section is found."""
        return self.opens.strip()

    def begins_with(self, char: str) -> bool:
        """Whether the first thing behind ``opens`` can begin with ``char``."""
        head: Part = self.brackets[0] or self.call[0]
        if isinstance(head, str):
            return head.lstrip().startswith(char)
        return char == "{" if isinstance(head, Envelope) else char.isalnum() or char == "_"

    @property
    def literals(self) -> list[str]:
        """Every text that the format writes by itself."""
        texts = [self.opens, *self.brackets, self.closes]
        for part in self.call:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Parameters):
                texts += [part.before, part.between, part.after]
            elif isinstance(part, CallId):
                texts.append(part.before)
            elif isinstance(part, Arguments) and part.notation is not None:
                texts += [quote for quote in part.notation.quotes if len(quote) > 1]
        return [text for text in texts if text]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the models of one family write calls.

    Attributes:
        name: as in ``--tool-parser``.
        formats: the first is the one that is written and enforced; the others are read as well.
        aliases: names of other servers for the same.
        marks: texts of which the chat template contains all, for one of the tuples.
        id_form: of the ids that the server makes; ``hex`` for OpenAI's, ``short`` for nine characters, or a form.
        answers: what an answer that is no call begins with.
    """

    name: str
    formats: tuple[Format, ...]
    aliases: tuple[str, ...] = ()
    marks: tuple[tuple[str, ...], ...] = ()
    id_form: str = "hex"
    answers: str = ""

    @property
    def triggers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(form.trigger for form in self.formats if form.trigger))

    def special(self, tokens: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the tokenizer's special ``tokens`` that occur in what the family writes."""
        texts = [text for form in self.formats for text in form.literals]
        return tuple(token for token in tokens if any(token in text for text in texts))
