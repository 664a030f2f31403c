"""Encoding of texts that begin like earlier ones: turns of a conversation, branches of a program.

A vocabulary that cuts texts into words before it looks them up encodes every word by itself, whatever stands before
it. So a text that agrees with an earlier one beyond the end of a word has its ids up to there, and only the rest is
encoded. Where a word ends is known of the earlier text; what a rule of splitting looks ahead is far shorter than the
part that has to agree beyond it. A long text is encoded in pieces for the same reason, each of which begins where a
word of the piece before ended, so that what it costs has a bound and ends where no more ids are wanted.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bough.base.plan import Ints
from bough.base.validate import too_long
from bough.text.tokenizer import Tokenizer

LEAST = 4096
"""Characters of a text that is remembered; a shorter one is encoded sooner than it is looked for."""
HEAD = 512
"""Characters that two texts must begin with alike to be compared."""
AHEAD = 256
"""Characters beyond the end of a word that must agree, too: more than any rule of splitting or special token has."""
PIECE = 64 << 10
"""Characters of a text that are encoded at one time, where it can be cut."""
MOST = 8 << 20
"""Characters that are remembered in all; the text that was used longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How many ids of a text matter: its ``most`` first ones, its last ones, or all, in a context of ``most``."""

    most: int
    keep: Literal["whole", "begin", "end"] = "whole"


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A text, its ids, and some ends of words: ``ids[:index[k]]`` are those of ``text[:ends[k]]``.

    Where ``part`` is set these are not all ids, but those that were asked for or a few more.
    """

    text: str
    ids: Ints
    index: list[int]
    ends: list[int]
    part: bool = False


_Head = tuple[str, bool, str]


class TextMemory:
    """Encodes texts as ``tokenizer`` does. Safe from any thread.

    Vocabularies that do not cut texts into words, or put something before every text, have each text encoded whole.
    """

    def __init__(self, tokenizer: Tokenizer, least: int = LEAST, most: int = MOST, piece: int = PIECE) -> None:
        """``least``, ``most``, ``piece``: as the constants of this module."""
        self._tokenizer = tokenizer
        self._least, self._room, self._piece = least, most, piece
        self._by_head: dict[_Head, dict[int, _Known]] = {}
        self._order: OrderedDict[int, _Head] = OrderedDict()
        self._serial = 0
        self._lock = threading.Lock()
        plain, framed = (tokenizer.encode("a", add_special=add) for add in (False, True))
        self._reliable = framed[-len(plain) :] == plain  # nothing comes after a text, either

    def encode(self, text: str, *, add_special: bool, owner: str = "", bound: Bound | None = None) -> list[int]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode`; what one ``owner`` has sent helps no other.

        Of ids that do not matter as ``bound`` says, as many are there as were found on the way. Raises InvalidRequest
        for invalid Unicode, and where it is found on the way that the context has no room for all.
        """
        if len(text) < self._least or not self._reliable:
            return self._tokenizer.encode(text, add_special=add_special)
        head = owner, add_special, text[:HEAD]
        known, used = self._begun(head, text, bound)
        if known is None and not used:
            known = self._go_on(_Known(text, np.empty(0, np.int32), [], []), 0, text, add_special, bound)
        if known is None:
            return self._tokenizer.encode(text, add_special=add_special)
        if not known.part:
            with self._lock:
                self._remember(head, known, used)
        elif bound is not None and bound.keep == "whole":
            raise too_long(f"more than {bound.most} tokens", bound.most)
        whole: list[int] = known.ids.tolist()
        return whole

    def _begun(self, head: _Head, text: str, bound: Bound | None) -> tuple[_Known | None, int]:
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
        return self._go_on(known, last, text, False, bound), number

    def _go_on(self, before: _Known, last: int, text: str, add_special: bool, bound: Bound | None) -> _Known | None:
        """``text``, which agrees with another beyond its end of a word ``last``, or is new where that knows nothing.

        None where words are not by themselves, or where too little of them is known to cut ``text``.
        """
        index, ends = before.index[:last], before.ends[:last]
        i, end = (index[-1], ends[-1]) if last else (0, 0)
        again = before.ids[i : before.index[last]] if last else before.ids
        parts, n, dropped = [before.ids[:i]], i, 0
        while True:
            piece = text[end : end + self._piece]
            ids, at, stops = self._tokenizer.encode_words(piece, add_special=add_special and end == 0)
            # Encoded once more, which shows that nothing is put before a text.
            if not np.array_equal(again, ids[: len(again)]):
                self._reliable = False
                return None
            rest = end + len(piece) < len(text)
            kept = bisect_right(stops, self._piece - AHEAD) - 1 if rest else len(stops)
            if kept < 1 and rest:
                return None
            index += [n + each for each in at[:kept]]
            ends += [end + each for each in stops[:kept]]
            parts.append(np.array(ids[: at[kept - 1]] if rest else ids, np.int32))
            n += len(parts[-1])
            if bound is not None and bound.keep == "end":
                while n - dropped - len(parts[0]) >= bound.most:
                    dropped += len(parts.pop(0))
            if not rest:
                return _Known(text, np.concatenate(parts), index, ends, part=dropped > 0)
            if bound is not None and bound.keep != "end" and n > bound.most:
                return _Known(text, np.concatenate(parts), index, ends, part=True)
            end = ends[-1]
            again = np.array(ids[at[kept - 1] : at[kept]], np.int32)

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


def check_size(text: str, tokenizer: Tokenizer, bound: Bound | None) -> None:
    """Raises InvalidRequest for a text of more bytes than the ids of the whole context can stand for."""
    if bound is not None and bound.keep == "whole" and (n := tokenizer.least_ids(text)) > bound.most:
        raise too_long(f"at least {n} tokens", bound.most)


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
