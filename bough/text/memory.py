"""Encoding of texts that begin like earlier ones: turns of a conversation, branches of a program.

A vocabulary that cuts texts into words before it looks them up encodes every word by itself, whatever stands before
it. So a text that agrees with an earlier one beyond the end of a word has its ids up to there, and only the rest is
encoded. Where a word ends is known of the earlier text; what a rule of splitting looks ahead is far shorter than the
part that has to agree beyond it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from bough.base.plan import Ints
from bough.text.tokenizer import Tokenizer

LEAST = 4096
"""Characters of a text that is remembered; a shorter one is encoded sooner than it is looked for."""
HEAD = 512
"""Characters that two texts must begin with alike to be compared."""
AHEAD = 256
"""Characters beyond the end of a word that must agree, too: more than any rule of splitting or special token has."""
MOST = 8 << 20
"""Characters that are remembered in all; the text that was used longest ago is forgotten first."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A text, its ids, and some ends of words: ``ids[:index[k]]`` are those of ``text[:ends[k]]``."""

    text: str
    ids: Ints
    index: list[int]
    ends: list[int]


_Head = tuple[str, bool, str]


class TextMemory:
    """Encodes texts as ``tokenizer`` does. Safe from any thread.

    Vocabularies that do not cut texts into words, or put something before every text, have each text encoded whole.
    """

    def __init__(self, tokenizer: Tokenizer, least: int = LEAST, most: int = MOST) -> None:
        """``least``, ``most``: as the constants of this module."""
        self._tokenizer = tokenizer
        self._least, self._room = least, most
        self._by_head: dict[_Head, dict[int, _Known]] = {}
        self._order: OrderedDict[int, _Head] = OrderedDict()
        self._serial = 0
        self._lock = threading.Lock()
        plain, framed = (tokenizer.encode("a", add_special=add) for add in (False, True))
        self._reliable = framed[-len(plain) :] == plain  # nothing comes after a text, either

    def encode(self, text: str, *, add_special: bool, owner: str = "") -> list[int]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode`; what one ``owner`` has sent helps no other."""
        if len(text) < self._least or not self._reliable:
            return self._tokenizer.encode(text, add_special=add_special)
        head = owner, add_special, text[:HEAD]
        known, used = self._begun(head, text)
        if known is None:
            ids, index, ends = self._tokenizer.encode_words(text, add_special=add_special)
            known = _Known(text, np.array(ids, np.int32), index, ends)
        with self._lock:
            self._remember(head, known, used)
        whole: list[int] = known.ids.tolist()
        return whole

    def _begun(self, head: _Head, text: str) -> tuple[_Known | None, int]:
        """``text`` by going on with what it has most in common with, whose number is the second; None where there is
        nothing to go on with."""
        with self._lock:
            candidates = list(self._by_head.get(head, {}).items())
        most, found = 0, None
        for number, known in candidates:
            last = bisect_right(known.ends, _common(text, known.text) - AHEAD) - 1
            if last > 0 and known.ends[last] > most:
                most, found = known.ends[last], (number, known, last)
        if found is None:
            return None, 0
        number, known, last = found
        return self._go_on(known, last, text), number

    def _go_on(self, before: _Known, last: int, text: str) -> _Known | None:
        """``text``, which agrees with another beyond its end of a word ``last``; None where words are not by
        themselves."""
        i, end = before.index[last - 1], before.ends[last - 1]
        ids, index, ends = self._tokenizer.encode_words(text[end:], add_special=False)
        again = before.ids[i : before.index[last]]  # encoded once more, which shows that nothing is put before a text
        if not np.array_equal(again, ids[: len(again)]):
            self._reliable = False
            return None
        return _Known(
            text,
            np.concatenate((before.ids[:i], np.array(ids, np.int32))),
            before.index[:last] + [i + at for at in index],
            before.ends[:last] + [end + at for at in ends],
        )

    def _remember(self, head: _Head, known: _Known, used: int) -> None:
        """Keep ``known``, in place of what it goes on with if that was all of it."""
        if used in self._order:
            self._order.move_to_end(used)
            if known.text.startswith(self._by_head[head][used].text):
                self._forget(used)
        self._serial += 1
        self._order[self._serial] = head
        self._by_head.setdefault(head, {})[self._serial] = known
        self._room -= len(known.text)
        while self._room < 0:
            self._forget(next(iter(self._order)))

    def _forget(self, serial: int) -> None:
        head = self._order.pop(serial)
        self._room += len(self._by_head[head].pop(serial).text)
        if not self._by_head[head]:
            del self._by_head[head]


def _common(a: str, b: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
