"""A third backend, in one file: choices only, by looking at every token's bytes."""

from __future__ import annotations

from collections.abc import Sequence

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.plan import Ints
from bough.grammar.admission import parse
from bough.grammar.base import BACKENDS, Matcher, Vocabulary
from bough.grammar.reasoning import allow


class TrieMatcher:
    """Knows what was said, and what is left of each choice that begins so."""

    free = False

    def __init__(self, choices: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self.rests = list(choices)
        self._vocabulary = vocabulary
        self._over = False

    def allowed(self) -> list[int]:
        known = {token: self._vocabulary.token_bytes(token) for token in range(self._vocabulary.n_tokens)}
        special = self._vocabulary.special.values()
        found = [token for token, data in known.items() if token not in special and data and self._after(data)]
        return found + (list(self._vocabulary.eos_ids) if b"" in self.rests else [])

    def _after(self, data: bytes) -> list[bytes]:
        return [rest[len(data) :] for rest in self.rests if rest.startswith(data)]

    @property
    def ended(self) -> bool:
        return self.rests == [b""]

    def accept(self, token: int) -> bool:
        if self._over or token not in self.allowed():
            return False
        if token in self._vocabulary.eos_ids:
            self._over = True
        else:
            self.rests = self._after(self._vocabulary.token_bytes(token))
        return True

    def forced(self, most: int) -> list[int]:
        return [self._vocabulary.eos_ids[0]] if most and self.ended and not self._over else []

    def error(self) -> str | None:
        return None


class TrieTemplate:
    warnings: tuple[str, ...] = ()

    def __init__(self, choices: Sequence[bytes], vocabulary: Vocabulary) -> None:
        self._choices = choices
        self._vocabulary = vocabulary
        self.bytes = sum(map(len, choices))

    def matcher(self) -> TrieMatcher:
        return TrieMatcher(self._choices, self._vocabulary)


class Trie:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def compile(self, constraint: Constraint) -> TrieTemplate:
        if constraint.kind != "choice":
            raise InvalidRequest(f"{constraint.kind} is not supported by this backend", param=constraint.kind)
        return TrieTemplate([choice.encode() for choice in parse(constraint)], self._vocabulary)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        for matcher, row in matchers:
            assert isinstance(matcher, TrieMatcher)
            bits[row] = 0
            for token in matcher.allowed():
                allow(bits[row], token)

    def close(self) -> None:
        pass


BACKENDS.add("trie", "tests.grammar.trie:Trie")
