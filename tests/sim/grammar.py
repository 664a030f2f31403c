"""Grammars of the simulation: small random automata over token ids, compiled in steps of the fake clock.

The text of a constraint is four numbers: which automaton, how many steps its compile takes, whether that fails (1),
and after how many tokens its matchers break (-1: never).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.plan import Ints
from bough.grammar.base import Matcher
from bough.grammar.tags import Tags

from .oracle import EOS, VOCAB, Automaton


def constraint(automaton: int, delay: int = 0, fails: bool = False, breaks: int = -1) -> Constraint:
    return Constraint(kind="regex", text=f"{automaton} {delay} {int(fails)} {breaks}")


class FakeMatcher:
    """A walk over an automaton."""

    free = False

    def __init__(self, automaton: Automaton, breaks: int) -> None:
        self._automaton = automaton
        self._left = breaks
        self._state = 0
        self._over = False

    @property
    def allowed(self) -> list[int]:
        return self._automaton.allowed(self._state)

    @property
    def ended(self) -> bool:
        return self.allowed == list(EOS)

    def accept(self, token: int) -> bool:
        if self._over or self._left == 0 or token not in self.allowed:
            return False
        self._left -= 1
        self._over = token in EOS
        self._state = self._automaton.after(self._state, token)
        return True

    def forced(self, most: int) -> list[int]:
        tokens: list[int] = []
        state = self._state
        while not self._over and self._left and len(tokens) < most:
            allowed = self._automaton.allowed(state)
            if allowed == list(EOS):
                return tokens or [EOS[0]]
            if len(allowed) > 1 or len(tokens) == self._left:
                break
            tokens.append(allowed[0])
            state = self._automaton.after(state, allowed[0])
        return tokens

    def error(self) -> str | None:
        return "the automaton is broken" if self._left == 0 else None


@dataclass(frozen=True, slots=True)
class FakeTemplate:
    automaton: Automaton
    breaks: int
    warnings: tuple[str, ...] = ()
    bytes: int = 1000

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self.automaton, self.breaks)


class FakeBackend:
    """A :class:`bough.grammar.base.Backend`."""

    def compile(self, constraint: Constraint) -> FakeTemplate:
        automaton, _, fails, breaks = map(int, constraint.text.split())
        if fails:
            raise InvalidRequest("the automaton has no beginning", param="regex")
        return FakeTemplate(Automaton(automaton), breaks)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        for matcher, row in matchers:
            assert isinstance(matcher, FakeMatcher)
            mask = np.zeros(bits.shape[1] * 32, np.uint8)
            mask[matcher.allowed] = 1
            bits[row] = np.packbits(mask, bitorder="little").view(np.int32)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, slots=True)
class Scanned:
    """A scan of the vocabulary that is over."""

    found: list[int]

    def done(self) -> bool:
        return True

    def result(self) -> list[int]:
        return self.found


def tags() -> Tags:
    """Those of a vocabulary in which an id is a byte."""
    return Tags(lambda token: bytes([token]), VOCAB, lambda work: Scanned(work()))


@dataclass(slots=True)
class Compile:
    """A compile on the fake clock."""

    ready: int
    steps: Callable[[], int]
    outcome: FakeTemplate | InvalidRequest

    def done(self) -> bool:
        return self.steps() >= self.ready

    def result(self) -> FakeTemplate:
        if isinstance(self.outcome, InvalidRequest):
            raise self.outcome
        return self.outcome


@dataclass(slots=True)
class Background:
    """Runs compiles, each in as many steps as its constraint says; ``steps`` is the fake clock."""

    steps: Callable[[], int]
    started: dict[str, Compile] = field(default_factory=dict)
    """By text; a constraint is compiled once."""
    expected: str = ""
    """The text of the constraint that arrives now."""

    def submit(self, work: Callable[[], FakeTemplate]) -> Compile:
        assert self.expected not in self.started, f"{self.expected} is compiled twice"
        try:
            outcome: FakeTemplate | InvalidRequest = work()
        except InvalidRequest as error:
            outcome = error
        compile = Compile(self.steps() + int(self.expected.split()[1]), self.steps, outcome)
        self.started[self.expected] = compile
        return compile

    def known_failure(self, text: str) -> bool:
        """Whether ``text`` failed before and everybody knows."""
        compile = self.started.get(text)
        return compile is not None and compile.done() and isinstance(compile.outcome, InvalidRequest)


@cache
def _shared(template: FakeTemplate) -> FakeMatcher:
    """One matcher for all; what a planted bug hands out."""
    return FakeMatcher(template.automaton, template.breaks)
