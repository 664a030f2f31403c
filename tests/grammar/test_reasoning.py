"""Reasoning before the constrained part, against a slow twin that looks at all tokens every time."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bough.base.constraint import Reasoning
from bough.grammar.reasoning import ReasoningMatcher, allow, write_only
from bough.sim.device import allowed_ids
from tests.sim.grammar import FakeMatcher, tags
from tests.sim.oracle import Automaton

VOCAB, EOS = 97, (0, 3)
TOKENS = st.sampled_from((7, 8, 9))


def mask(matcher: ReasoningMatcher) -> list[int]:
    bits = np.full(-(-VOCAB // 32), 0x55, np.int32)
    matcher.write(bits, VOCAB)
    return allowed_ids(bits[None], VOCAB)[0]


@given(
    tag=st.lists(TOKENS, min_size=1, max_size=5), said=st.lists(TOKENS, max_size=40),
    budget=st.none() | st.integers(0, 30),
)  # fmt: skip
def test_the_tag_is_found_wherever_it_ends(tag: list[int], said: list[int], budget: int | None) -> None:
    inner = FakeMatcher(Automaton(1), -1)
    matcher = ReasoningMatcher(Reasoning(end=tuple(tag), budget=budget), tags(), EOS, inner)
    for n in range(len(said) + 1):
        text = said[:n]
        assert matcher.inside == (text[len(text) - len(tag) :] != tag or n < len(tag))
        if not matcher.inside:
            assert matcher.forced(9) == inner.forced(9) and matcher.ended == inner.ended
            return
        begun = max(k for k in range(min(len(tag), n + 1)) if text[n - k :] == tag[:k])
        spent = budget is not None and n >= budget
        assert matcher.forced(9) == (tag[begun:] if spent else [])
        assert mask(matcher) == ([tag[begun]] if spent else [t for t in range(VOCAB) if t not in EOS])
        assert not matcher.free and not matcher.ended and not matcher.accept(EOS[0])
        if n < len(said):
            assert matcher.accept(said[n])


def test_without_a_constraint_only_the_tag_is_ever_forced() -> None:
    matcher = ReasoningMatcher(Reasoning(end=(7, 8), budget=1), tags(), EOS, None)
    assert matcher.free and matcher.accept(EOS[1])
    assert not matcher.free and matcher.forced(1) == [7] and matcher.forced(5) == [7, 8]
    assert matcher.accept(7) and matcher.accept(8)
    assert matcher.free and not matcher.ended and matcher.forced(5) == [] and matcher.error() is None


def test_a_firm_tag_that_has_begun_has_to_end() -> None:
    matcher = ReasoningMatcher(Reasoning(end=(7, 8, 9), firm=True), tags(), EOS, FakeMatcher(Automaton(1), -1))
    assert matcher.accept(7) and matcher.forced(5) == [] and len(mask(matcher)) > 90
    assert matcher.accept(8) and matcher.forced(5) == [9] and mask(matcher) == [9] and not matcher.free
    assert matcher.accept(9) and not matcher.inside


@given(st.integers(0, VOCAB - 1))
def test_a_mask_of_one(token: int) -> None:
    bits = np.full(-(-VOCAB // 32), -1, np.int32)
    write_only(bits, token)
    assert allowed_ids(bits[None], VOCAB) == [[token]]


@given(
    begin=st.lists(TOKENS, min_size=1, max_size=3), said=st.lists(TOKENS, max_size=12),
    budget=st.none() | st.integers(0, 6),
)  # fmt: skip
def test_reasoning_that_may_begin(begin: list[int], said: list[int], budget: int | None) -> None:
    end = (8, 9)
    twin = ReasoningMatcher(Reasoning(end=end, budget=budget), tags(), EOS, None)
    matcher = ReasoningMatcher(Reasoning(end=end, budget=budget, begin=tuple(begin)), tags(), EOS, None)
    for n in range(len(said) + 1):
        text = said[:n]
        if text == begin[:n] and n < len(begin):
            assert matcher.opening == begin[n] and matcher.free and not matcher.inside and matcher.forced(5) == []
        elif text[: len(begin)] == begin:
            assert matcher.opening is None and matcher.inside == twin.inside and matcher.free == twin.free
            assert matcher.forced(5) == twin.forced(5)
            if n < len(said):
                twin.accept(said[n])
        else:
            assert matcher.opening is None and matcher.free and not matcher.inside and matcher.forced(5) == []
        if n < len(said):
            assert matcher.accept(said[n])


def test_what_does_not_begin_with_the_tag_is_the_constraints() -> None:
    reasoning = Reasoning(end=(7,), budget=2, begin=(9,))
    inner, other = FakeMatcher(Automaton(1), -1), FakeMatcher(Automaton(1), -1)
    first = next(token for token in other.allowed if token not in (9, *EOS))
    assert other.accept(first)
    matcher = ReasoningMatcher(reasoning, tags(), EOS, inner)
    assert matcher.forced(5) == [] and not matcher.ended and not matcher.free
    assert matcher.accept(first) and not matcher.inside and matcher.forced(5) == other.forced(5)
    thinking = ReasoningMatcher(reasoning, tags(), EOS, FakeMatcher(Automaton(1), -1))
    assert thinking.accept(9) and thinking.inside and thinking.accept(30) and thinking.forced(3) == []
    assert thinking.accept(30) and thinking.forced(3) == [7]
    bits = np.zeros(4, np.int32)
    write_only(bits, 5)
    allow(bits, 63)
    assert allowed_ids(bits[None], VOCAB)[0] == [5, 63]


def test_a_tag_of_several_tokens_beside_a_constraint_has_to_go_on() -> None:
    allowed = [token for token in FakeMatcher(Automaton(1), -1).allowed if token not in EOS]
    barred = next(token for token in range(VOCAB) if token not in (*allowed, *EOS))
    reasoning = Reasoning(end=(7,), budget=1, begin=(barred, 8, 9))
    matcher = ReasoningMatcher(reasoning, tags(), EOS, FakeMatcher(Automaton(1), -1))
    assert matcher.opening == barred and matcher.accept(barred)
    for n, token in enumerate((8, 9)):
        assert matcher.inside and not matcher.free and not matcher.ended
        assert matcher.forced(9) == [8, 9][n:] and mask(matcher) == [token]
        assert not matcher.accept(allowed[0]) and matcher.accept(token)
    assert matcher.inside and matcher.forced(9) == [] and matcher.accept(50) and matcher.forced(9) == [7]
    # What the constraint allows is not taken for the tag.
    twin = FakeMatcher(Automaton(1), -1)
    assert twin.accept(allowed[0])
    reasoning = Reasoning(end=(7,), budget=1, begin=(allowed[0], 8))
    matcher = ReasoningMatcher(reasoning, tags(), EOS, FakeMatcher(Automaton(1), -1))
    assert matcher.accept(allowed[0]) and not matcher.inside and matcher.forced(5) == twin.forced(5)
