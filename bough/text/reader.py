"""A window over text that arrives in pieces, for parsers that must not depend on where it was cut.

Parsers are generators that ``yield`` whenever what they can decide depends on text that has not arrived. The window
keeps only what is undecided, which is never more than the longest literal, so parsing is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache

Parse = Generator[None, None, None]
"""A parser that reports through side effects."""

Sink = Callable[[str], None]

_SPACE = re.compile(r"\s*+")


class Mismatch(Exception):
    """The text does not go on as its format says; the message is for people.

    ``ended``: only because it ended.
    """

    def __init__(self, message: str, *, ended: bool = False) -> None:
        super().__init__(message)
        self.ended = ended


class Literals:
    """Texts to look for together, none of which is the beginning of another."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._longest = max(map(len, texts), default=1) - 1
        self._firsts = frozenset(text[0] for text in texts)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def held(self, text: str, start: int) -> int:
        """From where on the end of ``text``, in which none was found, may be the beginning of one."""
        for at in range(max(start, len(text) - self._longest), len(text)):
            if text[at] in self._firsts:
                tail = text[at:]
                if any(literal.startswith(tail) for literal in self.texts):
                    return at
        return len(text)


@lru_cache(maxsize=1024)
def literals(*texts: str) -> Literals:
    """The table of ``texts``, made once."""
    return Literals(texts)


class Reader:
    """Text that was pushed and not yet taken.

    While recording (:meth:`mark`), what is taken is also kept, for a parser that may have to give it back as text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._record: list[str] | None = None
        self.ended = False

    def push(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def mark(self) -> None:
        """Begin to record."""
        self._record = []

    def unmark(self) -> str:
        """Stop to record; returns what was taken since :meth:`mark`."""
        record, self._record = self._record, None
        return "".join(record or ())

    # Taking what is there

    def take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Take what ``pattern`` matches here; patterns match prefixes of what they match."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end()) if found is not None else ""

    def take_all(self) -> str:
        return self.take(len(self._text))

    @property
    def empty(self) -> bool:
        return self._at == len(self._text)

    # Waiting for what is to come

    def char(self) -> Generator[None, None, str]:
        """The next character, which stays; "" at the end."""
        while self.empty and not self.ended:
            yield
        return "" if self.empty else self._text[self._at]

    def ahead(self, n: int) -> Generator[None, None, str]:
        """The next ``n`` characters, which stay; fewer at the end."""
        while len(self._text) - self._at < n and not self.ended:
            yield
        return self._text[self._at : self._at + n]

    def skip(self, n: int) -> None:
        self.take(self._at + n)

    def space(self) -> Parse:
        """Take white space; afterwards there is a next character, or the text has ended."""
        while True:
            self.take_match(_SPACE)
            if not self.empty or self.ended:
                return
            yield

    def run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Take the longest run that ``pattern``, a repeated character class, matches."""
        parts = []
        while True:
            parts.append(self.take_match(pattern))
            if not self.empty or self.ended:
                return "".join(parts)
            yield

    def until(self, stops: Literals, sink: Sink) -> Generator[None, None, str | None]:
        """Take text into ``sink`` until one of ``stops``, which is taken and returned; None at the end."""
        while True:
            found = stops.find(self._text, self._at)
            if found is not None:
                self._give(sink, found.start())
                self.take(found.end())
                return found.group()
            self._give(sink, len(self._text) if self.ended else stops.held(self._text, self._at))
            if self.ended:
                return None
            yield

    def _give(self, sink: Sink, end: int) -> None:
        if end > self._at:
            sink(self.take(end))

    def literal(self, text: str) -> Parse:
        """Take ``text``, before and in which white space is free. Raises Mismatch at the first other character."""
        for piece in text.split():
            yield from self.space()
            for size in range(1, len(piece) + 1):
                ahead = yield from self.ahead(size)
                if ahead != piece[:size]:
                    raise Mismatch(f"expected {piece!r}", ended=len(ahead) < size)
            self.skip(len(piece))

    def choice(self, texts: tuple[str, ...]) -> Generator[None, None, str | None]:
        """Take white space and whichever of ``texts`` follows it, and return it; None when none does."""
        yield from self.space()
        size = 0
        while True:
            ahead = yield from self.ahead(size + 1)
            possible = [text for text in texts if text.startswith(ahead)] if len(ahead) > size else []
            if not possible:
                return None
            size += 1
            if ahead in possible:
                self.skip(size)
                return ahead
