"""Tags that begin or end the reasoning, found by their bytes: a token may hold the end of one and more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bough.base.errors import InvalidRequest

TokenBytes = Callable[[int], bytes]


class Scan(Protocol):
    """A scan that runs elsewhere; :class:`concurrent.futures.Future` is one."""

    def done(self) -> bool: ...
    def result(self) -> list[int]: ...


Submit = Callable[[Callable[[], list[int]]], Scan]


class Tag:
    """One tag, as any tokens may spell it.

    How much of it a text ends with is its *state*, in bytes, ``len(text)`` where the tag is complete.

    Attributes:
        ids: its tokens when it is written by itself.
        text: its bytes, at least one.
        token_bytes: the bytes that an id adds to a text.
    """

    def __init__(self, ids: tuple[int, ...], token_bytes: TokenBytes, scan: Scan) -> None:
        self.ids = ids
        self.token_bytes = token_bytes
        self._scan = scan
        pieces = [token_bytes(token) for token in ids]
        self.text = spelled(pieces)
        self._borders = _borders(self.text)
        self._places: dict[int, int] = {}
        place = len(self.text) - sum(map(len, pieces))
        for n, piece in enumerate(pieces):
            self._places[max(place, 0)] = n
            place += len(piece)
        self._late: dict[int, tuple[int, ...]] = {}

    @property
    def ready(self) -> bool:
        """Whether :meth:`late` can be asked."""
        return self._scan.done()

    def open(self, state: int, token: int) -> tuple[int, bytes]:
        """As :meth:`move`, for a tag with which a text begins; 0 where ``token`` does not go on with it."""
        piece, left = self.token_bytes(token), self.text[state:]
        if not state:
            piece = piece.removeprefix(b" ")
        if left.startswith(piece):
            return state + len(piece), b""
        return (len(self.text), piece[len(left) :]) if piece.startswith(left) else (0, b"")

    def move(self, state: int, piece: bytes) -> tuple[int, bytes]:
        """The state behind ``piece``, and what of the piece comes behind the tag where it completes it."""
        for n, byte in enumerate(piece, 1):
            while state and self.text[state] != byte:
                state = self._borders[state - 1]
            state += self.text[state] == byte
            if state == len(self.text):
                return state, piece[n:]
        return state, b""

    def rest(self, state: int) -> tuple[int, ...]:
        """Ids that complete the tag: those left of its own where one begins there, else all of them."""
        return self.ids[self._places.get(state, 0) :]

    def late(self, state: int) -> tuple[int, ...]:
        """Ids that complete the tag and go on with something else than white space."""
        found = self._late.get(state)
        if found is None:
            ends = ((token, self.move(state, self.token_bytes(token))[1]) for token in self._scan.result())
            found = self._late[state] = tuple(token for token, behind in ends if behind.strip())
        return found


class Tags:
    """The tags of a vocabulary.

    Args:
        token_bytes: the bytes that an id adds to a text.
        n_tokens: how many ids there are.
        submit: runs a function in the background.
    """

    def __init__(self, token_bytes: TokenBytes, n_tokens: int, submit: Submit) -> None:
        self._token_bytes = token_bytes
        self._n_tokens = n_tokens
        self._submit = submit
        self._scans: dict[int, Scan] = {}
        self._tags: dict[tuple[int, ...], Tag] = {}

    def __call__(self, ids: tuple[int, ...]) -> Tag:
        """The tag that ``ids`` spell; which tokens are longer than its end is found in the background.

        Raises InvalidRequest where they spell nothing.
        """
        tag = self._tags.get(ids)
        if tag is None:
            text = spelled([self._token_bytes(token) for token in ids])
            if not text:
                raise InvalidRequest("a tag of the reasoning has no text", param="reasoning")
            if len(self._tags) >= MOST:
                self._tags.clear()
            tag = self._tags[ids] = Tag(ids, self._token_bytes, self._scan(text[-1]))
        return tag

    def _scan(self, byte: int) -> Scan:
        """Finds the ids that have ``byte`` before others."""
        if byte not in self._scans:
            pieces = map(self._token_bytes, range(self._n_tokens))
            self._scans[byte] = self._submit(lambda: [n for n, piece in enumerate(pieces) if byte in piece[:-1]])
        return self._scans[byte]


MOST = 64
"""Tags that are kept: a model has one or two, and only a program of its own sends others."""


def spelled(pieces: list[bytes]) -> bytes:
    """A text of tokens that were encoded by themselves, before the first of which some tokenizers put a space."""
    return b"".join(pieces).removeprefix(b" ")


def _borders(text: bytes) -> list[int]:
    """For each prefix of ``text``, the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    borders = [0]
    for byte in text[1:]:
        k = borders[-1]
        while k and text[k] != byte:
            k = borders[k - 1]
        borders.append(k + (text[k] == byte))
    return borders
