"""Reasoning before the constrained part of an answer, and its budget."""

from __future__ import annotations

from bough.base.constraint import Reasoning
from bough.base.plan import Ints
from bough.grammar.base import WORD, Matcher
from bough.grammar.tags import Tags


class ReasoningMatcher:
    """A :class:`bough.grammar.base.Matcher` that lets everything pass until the end tag, then asks ``inner``.

    While it reasons, the end of the sequence is forbidden if a constrained part has to follow, and so are tokens that
    would reach into that part; white space is none of it. Once the budget is spent the tag is forced, from wherever in
    it the text is just then. Where the reasoning has a tag to begin with, an answer that does not begin with it is
    ``inner``'s from its first token. A tag of several tokens that has begun beside ``inner`` has to go on, so it may
    begin only with a token that ``inner`` does not allow.
    """

    def __init__(self, reasoning: Reasoning, tags: Tags, eos_ids: tuple[int, ...], inner: Matcher | None) -> None:
        self.inner = inner
        self._begin = tags(reasoning.begin) if reasoning.begin else None
        self._opened: int | None = 0 if reasoning.begin else None
        """Bytes of the opening tag that have come; None when that is settled."""
        self._end = tags(reasoning.end)
        self._budget = reasoning.budget
        self._firm = reasoning.firm and inner is not None and len(reasoning.end) > 1
        self._eos_ids = eos_ids if inner is not None else ()
        self._matched = 0
        self._tokens = 0

    @property
    def inside(self) -> bool:
        """It still reasons, or has to: its tag has begun."""
        return self._begun or self._opened is None and self._matched < len(self._end.text)

    @property
    def _begun(self) -> bool:
        """The tag that begins the reasoning must go on."""
        return self.inner is not None and bool(self._opened)

    @property
    def opening(self) -> int | None:
        """The id that would begin the reasoning now."""
        return None if self._begin is None or self._opened is None else self._begin.rest(self._opened)[0]

    @property
    def _spent(self) -> bool:
        return self._budget is not None and self._tokens >= self._budget

    @property
    def _held(self) -> bool:
        """The tag that ends the reasoning must come now."""
        return self._spent or self._firm and len(self._end.rest(self._matched)) == 1

    @property
    def free(self) -> bool:
        if self.inside:
            return not self._begun and not self._held and not self._eos_ids
        return self.inner is None or self.inner.free

    @property
    def ended(self) -> bool:
        return not self.inside and self._opened is None and self.inner is not None and self.inner.ended

    def accept(self, token: int) -> bool:
        if self._opened is not None:
            return self._accept_opening(token)
        if not self.inside:
            return self.inner is None or self.inner.accept(token)
        if token in self._eos_ids or (self.inner is not None and token in self._end.late(self._matched)):
            return False
        self._tokens += 1
        self._matched, _ = self._end.move(self._matched, self._end.token_bytes(token))
        return True

    def _accept_opening(self, token: int) -> bool:
        """Of the first tokens, while they may be the tag that begins the reasoning."""
        assert self._begin is not None and self._opened is not None
        several = not self._opened and len(self._begin.ids) > 1
        taken = several and self.inner is not None and self.inner.accept(token)
        if self.inner is None or (token == self.opening and not taken):
            opened, behind = self._begin.open(self._opened, token)
            if opened == len(self._begin.text):
                self._opened = None
                self._matched, _ = self._end.move(0, behind)
                return True
            if opened:
                self._opened = opened
                return True
        if self._begun:
            return False
        self._opened, self._matched = None, len(self._end.text)
        return taken or self.inner is None or self.inner.accept(token)

    def forced(self, most: int) -> list[int]:
        if self._begun:
            assert self._begin is not None and self._opened is not None
            return list(self._begin.rest(self._opened)[:most])
        if self.inside:
            return list(self._end.rest(self._matched)[:most]) if self._held else []
        return [] if self.inner is None or self._opened is not None else self.inner.forced(most)

    def error(self) -> str | None:
        return None if self.inner is None else self.inner.error()

    def write(self, bits: Ints, vocab_size: int) -> None:
        """The mask while it reasons, into ``bits`` [ceil(V / 32)]."""
        if self._begun or self._held:
            write_only(bits, self.forced(1)[0])
            return
        bits[:] = -1
        if vocab_size % WORD:
            bits[-1] = (1 << vocab_size % WORD) - 1
        barred = () if self.inner is None else self._end.late(self._matched)
        for token in (*self._eos_ids, *barred):
            bits.view("u4")[token // WORD] &= ~(1 << token % WORD) & 0xFFFFFFFF


def write_only(bits: Ints, token: int) -> None:
    """The mask that allows ``token`` alone, into ``bits`` [ceil(V / 32)]."""
    bits[:] = 0
    bits.view("u4")[token // WORD] = 1 << token % WORD


def allow(bits: Ints, token: int) -> None:
    """Let ``token`` pass too, in the mask ``bits`` [ceil(V / 32)]."""
    bits.view("u4")[token // WORD] |= 1 << token % WORD
