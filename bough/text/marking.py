"""Keeps special tokens that a client wrote apart from those of the chat template.

A chat prompt is the template's text with the client's strings inside, and one flat string cannot say
which ``<|im_end|>`` is whose. So before rendering, the beginning of everything in the client's strings
that could become a special token is replaced by a *mark*: one printable ideograph that occurs in none of
the strings. Templates may trim, split, compare and join what they are given; a mark survives all of
that. The tokenizer finds the special tokens of the marked text, which are the template's own, and encodes
what lies between them, marks undone, as plain text.

Two characters are enough to break a literal, and marking them wherever they occur, not only where the
literal is complete, also stops literals that a template would put together from several strings. More
are taken only where the template itself looks for the same two in its messages, as one that cuts at
``</think>`` does when ``</s>`` is a special token. What is not covered is a template that itself writes the
first characters of a special token directly before a client's string, as ``'<|' + role + '|>'`` does; roles
are therefore checked against a fixed list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bough.base.errors import InvalidRequest

# CJK extension G and B: printable (repr() of a dict leaves them alone), caseless, no decompositions, rare.
_ALPHABETS = ((0x30000, 0x3134A), (0x20000, 0x2A6DF))
_RARE = re.compile("[\U00020000-\U0002a6df\U00030000-\U0003134a]")


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered prompt with marks; ``marks`` maps each mark to what it stands for."""

    marked: str
    marks: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt as the client would read it."""
        return self.restore(self.marked)

    @property
    def has_marks(self) -> bool:
        return any(mark in self.marked for mark in self.marks)

    def restore(self, marked: str) -> str:
        """``marked`` (a part of the prompt) with its marks undone."""
        # One replacement after the other: several times faster on long text than translate().
        for mark, text in self.marks.items():
            marked = marked.replace(mark, text)
        return marked


class Marker:
    """Knows what to mark for one tokenizer and one template; hands out a :class:`Marks` per request.

    Args:
        literals: texts of the special tokens.
        constants: texts that the template writes or looks for.
    """

    def __init__(self, literals: Sequence[str], constants: Sequence[str]) -> None:
        ordered = sorted(filter(None, literals), key=len, reverse=True)
        for literal in ordered:
            constants = [part for text in constants for part in text.split(literal)]
        heads = {_head(literal, constants): None for literal in ordered}
        self.heads = tuple(heads)
        self.stubs = tuple({head[:size]: None for head in heads for size in range(len(head) - 1, 0, -1)})
        self.longest_stub = max(map(len, self.stubs), default=0)
        self.pattern = re.compile("|".join(re.escape(head) for head in sorted(heads, key=len, reverse=True)) or r"(?!)")

    def marks_for(self, strings: Sequence[str]) -> Marks:
        """An alphabet of marks that none of ``strings`` contains.

        Raises InvalidRequest when the strings leave no room, which takes tens of thousands of distinct
        rare ideographs.
        """
        used = {char for text in strings for char in _RARE.findall(text)}
        size = len(self.heads) + len(self.stubs) + 1
        for low, high in _ALPHABETS:
            for base in range(low, high - size + 1, size):
                if not used or not any(chr(base + k) in used for k in range(size)):
                    return Marks(self, base)
        raise InvalidRequest("the messages use too many distinct characters", param="messages")


def _head(literal: str, constants: Iterable[str]) -> str:
    """The shortest beginning of ``literal``, of two characters or more, that is in none of ``constants``."""
    constants = list(constants)
    for size in range(2, len(literal)):
        if not any(literal[:size] in text for text in constants):
            return literal[:size]
    return literal


class Marks:
    """One request's alphabet of marks."""

    def __init__(self, marker: Marker, base: int) -> None:
        self._marker = marker
        self._of_head = {head: chr(base + k) for k, head in enumerate(marker.heads)}
        base += len(marker.heads)
        self._of_stub = {stub: chr(base + k) for k, stub in enumerate(marker.stubs)}
        self.cut = chr(base + len(marker.stubs))
        """A spare character of the alphabet: where a continued message ends."""

    def mark(self, text: str) -> str:
        """``text`` with every possible beginning of a special token replaced by its mark."""
        marked = self._marker.pattern.sub(lambda match: self._of_head[match.group()], text)
        kept = marked.rstrip()
        for size in range(min(self._marker.longest_stub, len(kept)), 0, -1):
            if (mark := self._of_stub.get(kept[-size:])) is not None:
                return kept[:-size] + mark + marked[len(kept) :]
        return marked

    def wrap(self, marked: str) -> MarkedText:
        """The result of rendering, together with the meaning of its marks."""
        marks = {mark: text for table in (self._of_head, self._of_stub) for text, mark in table.items()}
        return MarkedText(marked, marks)
