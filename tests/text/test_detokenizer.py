"""Streamed text is the text: the same for every cut, never half a character."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.tokenizer import Tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip: bool, tail: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer, skip_special=skip, prompt_tail=tail)
    edges = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    return [*(stream.push(ids[a:b]) for a, b in zip(edges, edges[1:])), stream.flush()]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), skip=st.booleans())
def test_any_ids_in_any_cut_give_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(-1, min(tokenizer.vocab_size, 700)), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, 30)))
    assert "".join(streamed(tokenizer, ids, cuts, skip=skip, tail=[])) == tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), text=st.text(max_size=20), prompt=st.text(min_size=1, max_size=10))
def test_text_continues_the_prompt(tokenizer: Tokenizer, data: st.DataObject, text: str, prompt: str) -> None:
    ids = tokenizer.encode_bare("a" + prompt + text)
    at = data.draw(st.integers(1, len(ids)))
    whole = tokenizer.decode(ids)
    assume("\ufffd" not in whole)  # the default model has no token for a few bytes
    pieces = streamed(tokenizer, ids[at:], data.draw(st.lists(st.integers(0, 30))), skip=True, tail=ids[:at])
    # What the prompt ends with may be the first half of a character, which then belongs to the generation.
    begun = tokenizer.decode(ids[:at]).rstrip("\ufffd")
    assert begun + "".join(pieces) == whole


def test_pieces_of_valid_text_have_no_broken_characters(tokenizer: Tokenizer, strings: list[str]) -> None:
    rng = random.Random(3)
    for text in strings:
        ids = tokenizer.encode_plain(text)
        whole = tokenizer.decode(ids, skip_special=False)
        pieces = streamed(tokenizer, ids, [rng.randrange(40) for _ in range(8)], skip=False, tail=[])
        assert "".join(pieces) == whole
        assert "\ufffd" in whole or "\ufffd" not in "".join(pieces)


def test_agrees_with_the_library_on_valid_text(tokenizer: Tokenizer, strings: list[str]) -> None:
    for text in strings[:200]:
        ids = tokenizer.encode(text, add_special=True)
        assert "".join(streamed(tokenizer, ids, [], skip=True, tail=[])) == tokenizer._full.decode(ids)


def test_unfinished_character_appears_at_the_flush(smollm: Tokenizer) -> None:
    ids = smollm.encode_plain("🫠")
    assert len(ids) > 1
    stream = IncrementalDetokenizer(smollm)
    assert [stream.push([i]) for i in ids[:-1]] == [""] * (len(ids) - 1)
    assert stream.push(ids[-1:]) == "🫠" and stream.flush() == ""
    stream = IncrementalDetokenizer(smollm, prompt_tail=ids[:-1])
    assert stream.push(ids[-1:]) == "🫠"
    stream = IncrementalDetokenizer(smollm)
    stream.push(ids[:-1])
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens(smollm: Tokenizer, skip: bool) -> None:
    ids = smollm.encode("a<|im_end|>b", add_special=False)
    assert IncrementalDetokenizer(smollm, skip_special=skip).push(ids) == ("ab" if skip else "a<|im_end|>b")
