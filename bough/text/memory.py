"""Encoding of texts that begin like earlier ones: turns of a conversation, branches of a program.

A vocabulary that cuts texts into words before it looks them up encodes every word by itself, whatever stands before
it. So a text that agrees with an earlier one beyond the end of a word has its ids up to there, and only the rest is
encoded. Where a word ends is known of the earlier text; what a rule of splitting looks ahead is far shorter than the
part that has to agree beyond it. A long text is encoded in pieces for the same reason, each of which begins where a
word of the piece before ended, so that what it costs has a bound and ends where no more ids are wanted.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from bough.base.plan import Ints
from bough.base.validate import too_long
from bough.text.tokenizer import Tokenizer, longest_first

T = TypeVar("T")

Steps = Generator[int, None, T]
"""Work on a text that stops before each of its steps, and tells how many of its characters that is about."""

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
    """A text, its ids without a frame, and some ends of words: ``ids[:index[k]]`` are those of ``text[:ends[k]]``.

    Where ``part`` is set these are not all ids, but those that were asked for or a few more.
    """

    text: str
    ids: Ints
    index: Ints
    ends: Ints
    part: bool = False


_NONE = np.empty(0, np.int32)
_Head = tuple[str, str]


class TextMemory:
    """Encodes texts as ``tokenizer`` does. Safe from any thread.

    Vocabularies that do not cut texts into words have each text encoded whole.
    """

    def __init__(self, tokenizer: Tokenizer, least: int = LEAST, most: int = MOST, piece: int = PIECE) -> None:
        """``least``, ``most``, ``piece``: as the constants of this module."""
        self._tokenizer = tokenizer
        self._least, self._room, self._piece = least, most, piece
        self._sorted: dict[_Head, list[tuple[str, int]]] = {}  # texts that begin alike, with their numbers
        self._known: OrderedDict[int, tuple[_Head, _Known]] = OrderedDict()
        self._serial = 0
        self._lock = threading.Lock()

    def encode(self, text: str, *, add_special: bool, owner: str = "", bound: Bound | None = None) -> Steps[list[int]]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode`; what one ``owner`` has sent helps no other.

        Of ids that do not matter as ``bound`` says, as many are there as were found on the way. Raises InvalidRequest
        for invalid Unicode, and where it is found on the way that the context has no room for all.
        """
        ids = yield from self._bare(text, owner, bound)
        if ids is None:
            yield len(text)
            return self._tokenizer.encode(text, add_special=add_special)
        return self._tokenizer.framed(ids.tolist()) if add_special else ids.tolist()

    def encode_cut(
        self, text: str, most: int, *, left: bool = False, add_special: bool = True, owner: str = ""
    ) -> Steps[list[int]]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode_cut`; as much of ``text`` is encoded as its ids need."""
        room = self._tokenizer.room(most, add_special=add_special)
        ids = yield from self._bare(text, owner, Bound(max(room, 1), "end" if left else "begin"))
        if ids is None:
            yield len(text)
            return self._tokenizer.encode_cut(text, most, left=left, add_special=add_special)
        return self._tokenizer.cut(ids.tolist(), most, left=left, add_special=add_special)

    def encode_pair(
        self, first: str, second: str, most: int | None = None, *, add_special: bool = True
    ) -> Steps[list[int]]:
        """See :meth:`bough.text.tokenizer.Tokenizer.encode_pair`."""
        room = None if most is None else self._tokenizer.room(most, pair=True, add_special=add_special)
        enough = None if room is None else room + 1
        a = yield from self._plain(first, enough)
        b = yield from self._plain(second, enough)
        if room is not None and room % 2 and a is not None and b is not None and min(len(a), len(b)) > room:
            # Which one is longer decides whose the odd id is.
            a = yield from self._plain(first, None)
            b = yield from self._plain(second, None)
        if a is None or b is None:
            yield len(first) + len(second)
            return self._tokenizer.encode_pair(first, second, most, add_special=add_special)
        if room is not None:
            n_first, n_second = longest_first(len(a), len(b), room)
            a, b = a[:n_first], b[:n_second]
        return self._tokenizer.framed(a.tolist(), b.tolist()) if add_special else [*a.tolist(), *b.tolist()]

    def _plain(self, text: str, most: int | None) -> Steps[Ints | None]:
        """At least the first ``most`` ids of ``text``, in which the texts of special tokens are ordinary text."""
        yield min(len(text), self._piece)
        bound = None if most is None else Bound(most, "begin")
        known = yield from self._go_on(_Known("", _NONE, _NONE, _NONE), 0, text, bound, plain=True)
        return None if known is None else known.ids

    def _bare(self, text: str, owner: str, bound: Bound | None) -> Steps[Ints | None]:
        """Ids of ``text`` without a frame; None where it has to be encoded whole."""
        if len(text) < self._least:
            return None
        yield min(len(text), self._piece)
        head = owner, text[:HEAD]
        before, last, used = self._begun(head, text)
        known = yield from self._go_on(before, last, text, bound)
        if known is None:
            return None
        if not known.part:
            with self._lock:
                self._remember(head, known, used)
        elif bound is not None and bound.keep == "whole":
            raise too_long(f"more than {bound.most} tokens", bound.most)
        return known.ids

    def _begun(self, head: _Head, text: str) -> tuple[_Known, int, int]:
        """What ``text`` has most in common with, the last end of a word there that holds for ``text`` too, and its
        number; where there is none, a text that nothing is known of."""
        with self._lock:
            alike = self._sorted.get(head, [])
            at = bisect_left(alike, (text, 0))
            # No text of those that are sorted has more in common with this one than its neighbours.
            neighbours = [(number, self._known[number][1]) for _, number in alike[max(0, at - 1) : at + 1]]
        most, found = 0, (_Known("", _NONE, _NONE, _NONE), 0, 0)
        for number, known in neighbours:
            last = int(np.searchsorted(known.ends, _common(text, known.text) - AHEAD, "right")) - 1
            if last > 0 and known.ends[last] > most:
                most, found = int(known.ends[last]), (known, last, number)
        return found

    def _go_on(
        self, before: _Known, last: int, text: str, bound: Bound | None, *, plain: bool = False
    ) -> Steps[_Known | None]:
        """``text``, which agrees with another beyond its end of a word ``last``, or is new where that is 0.

        The first step has been waited for. None where words are not by themselves, or where too little of them is
        known to cut ``text``.
        """
        i, end = (int(before.index[last - 1]), int(before.ends[last - 1])) if last else (0, 0)
        again = before.ids[i : before.index[last]] if last else _NONE
        parts, index, ends, n, dropped = [before.ids[:i]], [before.index[:last]], [before.ends[:last]], i, 0
        while True:
            piece = text[end : end + self._piece]
            ids, at, stops = self._tokenizer.encode_words(piece, plain=plain)
            # Encoded once more, which shows that nothing is put before a text.
            if not np.array_equal(again, ids[: len(again)]):
                return None
            rest = end + len(piece) < len(text)
            kept = int(np.searchsorted(stops, self._piece - AHEAD, "right")) - 1 if rest else len(stops)
            if kept < 1 and rest:
                return None
            index.append(n + at[:kept])
            ends.append(end + stops[:kept])
            parts.append(ids[: at[kept - 1]] if rest else ids)
            n += len(parts[-1])
            if bound is not None and bound.keep == "end":
                while n - dropped - len(parts[0]) >= bound.most:
                    dropped += len(parts.pop(0))
            full = bound is not None and bound.keep != "end" and n > bound.most
            if full or not rest:
                part = dropped > 0 or (rest and full)
                return _Known(text, np.concatenate(parts), np.concatenate(index), np.concatenate(ends), part)
            end += int(stops[kept - 1])
            again = ids[at[kept - 1] : at[kept]]
            yield min(len(text) - end, self._piece)

    def _remember(self, head: _Head, known: _Known, used: int) -> None:
        """Keep ``known``, in place of what it goes on with if that was all of it."""
        if used in self._known:
            self._known.move_to_end(used)
            if known.text.startswith(self._known[used][1].text):
                self._forget(used)
        self._serial += 1
        self._known[self._serial] = head, known
        insort(self._sorted.setdefault(head, []), (known.text, self._serial))
        self._room -= len(known.text)
        while self._room < 0:
            self._forget(next(iter(self._known)))

    def _forget(self, serial: int) -> None:
        head, known = self._known.pop(serial)
        self._room += len(known.text)
        alike = self._sorted[head]
        del alike[bisect_left(alike, (known.text, serial))]
        if not alike:
            del self._sorted[head]


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
