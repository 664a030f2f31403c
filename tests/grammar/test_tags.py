"""Tags of the reasoning in texts as a tokenizer writes them, where tokens cross their ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.constraint import Reasoning
from bough.base.errors import InvalidRequest
from bough.engine.text import load_text
from bough.grammar.reasoning import ReasoningMatcher
from bough.grammar.tags import Tags
from bough.sim.device import allowed_ids
from bough.text.tokenizer import Tokenizer
from bough.weights.loader import open_checkpoint
from tests.sim.grammar import FakeMatcher, Scanned
from tests.sim.oracle import Automaton

EOS = (0, 2)
CLOSES = ("</think>", "[/THINK]", "Here is my response:", "◁/think▷", "aab")
TEXTS = st.text(st.sampled_from("ab <>/[].:\n{\"'Hetink▷"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    """Of the default model: its tokens hold "]\n", "b)" and ":{"."""
    checkpoint = open_checkpoint(default_model)
    try:
        return load_text(checkpoint.tokenizer_source)[0]
    finally:
        checkpoint.close()


@pytest.fixture(scope="module")
def tags(tokenizer: Tokenizer) -> Tags:
    return Tags(tokenizer.token_bytes, tokenizer.vocab_size, lambda work: Scanned(work()))


def ids_of(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special=False))


@given(closes=st.sampled_from(CLOSES), before=TEXTS, behind=TEXTS, budget=st.none() | st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_the_end_is_where_the_text_has_it(
    tokenizer: Tokenizer, tags: Tags, closes: str, before: str, behind: str, budget: int | None
) -> None:
    reasoning = Reasoning(end=ids_of(tokenizer, closes), budget=budget)
    free = ReasoningMatcher(reasoning, tags, EOS, None)
    held = ReasoningMatcher(reasoning, tags, EOS, FakeMatcher(Automaton(1), -1))
    said = b""
    for token in ids_of(tokenizer, before + closes + behind):
        piece = tokenizer.token_bytes(token)
        found = (said + piece).find(closes.encode())
        late = found >= 0 and bool((said + piece)[found + len(closes.encode()) :].strip())
        assert held.accept(token) != late
        said += piece
        assert free.accept(token)
        assert free.inside == (found < 0)
        if found >= 0:
            break
        assert held.inside
        spent = budget is not None and len(ids_of(tokenizer, before)) and held.forced(1)
        if spent:  # whatever the text ends with, what is forced completes the tag
            whole = said + b"".join(map(tokenizer.token_bytes, held.forced(99)))
            assert whole.endswith(closes.encode()) and whole.find(closes.encode()) == len(whole) - len(closes.encode())


@pytest.mark.parametrize("closes", CLOSES)
def test_tokens_that_reach_into_the_answer_are_barred(tokenizer: Tokenizer, tags: Tags, closes: str) -> None:
    whole, n = closes.encode(), len(closes.encode())
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    tag = tags(ids_of(tokenizer, closes))
    for state in (0, n - 1):
        behind = [(whole[:state] + piece).partition(whole)[2] for piece in pieces]
        assert list(tag.late(state)) == [token for token, text in enumerate(behind) if text.strip()]


def test_the_mask_of_a_tag_that_is_nearly_complete(tokenizer: Tokenizer, tags: Tags) -> None:
    end = ids_of(tokenizer, "aab")
    matcher = ReasoningMatcher(Reasoning(end=end), tags, EOS, FakeMatcher(Automaton(1), -1))
    for token in ids_of(tokenizer, "caa"):
        assert matcher.accept(token)
    bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    matcher.write(bits, tokenizer.vocab_size)
    barred = set(range(tokenizer.vocab_size)) - set(allowed_ids(bits[None], tokenizer.vocab_size)[0])
    assert barred == {*EOS, *tags(end).late(2)} and len(barred) > len(EOS)
    assert all(b"b" in tokenizer.token_bytes(token) for token in barred - set(EOS))


def test_a_beginning_that_its_last_token_outgrows(tokenizer: Tokenizer, tags: Tags) -> None:
    """Without a constraint, so that nothing holds the model to the tag's own tokens."""
    reasoning = Reasoning(begin=ids_of(tokenizer, "<think>"), end=ids_of(tokenizer, "</think>"), budget=3)
    for text, opens in (
        ("<think>\n", True),
        ("<think>x", True),
        ("<think", False),
        ("<thinkers>", False),
        ("a", False),
    ):
        matcher = ReasoningMatcher(reasoning, tags, EOS, None)
        for token in ids_of(tokenizer, text + " b c d e"):
            assert matcher.accept(token)
        assert matcher.inside == opens and bool(matcher.forced(9)) == opens, text


def test_a_tag_without_text_is_refused(tags: Tags) -> None:
    with pytest.raises(InvalidRequest, match="no text"):
        tags((1 << 20,))
