"""Reasoning before the constrained part of an answer, and its budget."""

from __future__ import annotations

from bough.base.constraint import Reasoning
from bough.base.plan import Ints
from bough.grammar.base import WORD, Matcher


class ReasoningMatcher:
    """A :class:`bough.grammar.base.Matcher` that lets everything pass until the end tag, then asks ``inner``.

    While it reasons, the end of the sequence is forbidden if a constrained part has to follow, and once the budget
    is spent the tag is forced, from wherever in it the text is just then. Where the reasoning has a tag to begin with,
    an answer that does not begin with it is ``inner``'s from its first token. A tag of several tokens that has begun
    beside ``inner`` has to go on, so it may begin only with a token that ``inner`` does not allow.
    """

    def __init__(self, reasoning: Reasoning, eos_ids: tuple[int, ...], inner: Matcher | None) -> None:
        self.inner = inner
        self._begin = reasoning.begin
        self._opened: int | None = 0 if reasoning.begin else None
        """Tokens of the opening tag that have come; None when that is settled."""
        self._end = reasoning.end
        self._budget = reasoning.budget
        self._eos_ids = eos_ids if inner is not None else ()
        self._fallback = _fallback(reasoning.end)
        self._matched = 0
        self._tokens = 0

    @property
    def inside(self) -> bool:
        """It still reasons, or has to: its tag has begun."""
        return self._begun or self._opened is None and self._matched < len(self._end)

    @property
    def _begun(self) -> bool:
        """The tag that begins the reasoning must go on."""
        return self.inner is not None and bool(self._opened)

    @property
    def opening(self) -> int | None:
        """The id that would begin the reasoning now."""
        return None if self._opened is None else self._begin[self._opened]

    @property
    def _spent(self) -> bool:
        return self._budget is not None and self._tokens >= self._budget

    @property
    def free(self) -> bool:
        if self.inside:
            return not self._begun and not self._spent and not self._eos_ids
        return self.inner is None or self.inner.free

    @property
    def ended(self) -> bool:
        return not self.inside and self._opened is None and self.inner is not None and self.inner.ended

    def accept(self, token: int) -> bool:
        if self._opened is not None:
            several = self._opened == 0 and len(self._begin) > 1
            taken = several and self.inner is not None and self.inner.accept(token)
            if token == self.opening and not taken:
                self._opened = self._opened + 1 if self._opened + 1 < len(self._begin) else None
                return True
            if self._begun:
                return False
            self._opened, self._matched = None, len(self._end)
            if taken:
                return True
        if not self.inside:
            return self.inner is None or self.inner.accept(token)
        if token in self._eos_ids:
            return False
        self._tokens += 1
        while self._matched and self._end[self._matched] != token:
            self._matched = self._fallback[self._matched - 1]
        self._matched += self._end[self._matched] == token
        return True

    def forced(self, most: int) -> list[int]:
        if self._begun:
            return list(self._begin[self._opened :][:most])
        if self.inside:
            return list(self._end[self._matched :][:most]) if self._spent else []
        return [] if self.inner is None or self._opened is not None else self.inner.forced(most)

    def error(self) -> str | None:
        return None if self.inner is None else self.inner.error()

    def write(self, bits: Ints, vocab_size: int) -> None:
        """The mask while it reasons, into ``bits`` [ceil(V / 32)]."""
        if self._begun or self._spent:
            write_only(bits, self.forced(1)[0])
            return
        bits[:] = -1
        if vocab_size % WORD:
            bits[-1] = (1 << vocab_size % WORD) - 1
        for token in self._eos_ids:
            bits.view("u4")[token // WORD] &= ~(1 << token % WORD) & 0xFFFFFFFF


def write_only(bits: Ints, token: int) -> None:
    """The mask that allows ``token`` alone, into ``bits`` [ceil(V / 32)]."""
    bits[:] = 0
    bits.view("u4")[token // WORD] = 1 << token % WORD


def allow(bits: Ints, token: int) -> None:
    """Let ``token`` pass too, in the mask ``bits`` [ceil(V / 32)]."""
    bits.view("u4")[token // WORD] |= 1 << token % WORD


def _fallback(tag: tuple[int, ...]) -> list[int]:
    """For each prefix of ``tag``, the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    borders = [0]
    for token in tag[1:]:
        k = borders[-1]
        while k and tag[k] != token:
            k = borders[k - 1]
        borders.append(k + (tag[k] == token))
    return borders
