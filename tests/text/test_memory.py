"""Texts that begin like earlier ones get the ids of the whole text, and little of them is encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import InvalidRequest
from bough.text.memory import PIECE, Bound, TextMemory, check_size
from bough.text.tokenizer import Tokenizer
from bough.text.vocabulary import Vocabulary
from bough.weights.gguf import GgufFile

from .conftest import SENTENCES

pieces = st.lists(st.sampled_from([*SENTENCES, "<s>", "<|im_start|>user\n", " ", "word ", "\n\n\n"]), max_size=60)


class Counting(Tokenizer):
    """Notes how much is encoded."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.encoded: list[int] = []

    def encode_words(self, text: str, *, add_special: bool) -> tuple[list[int], list[int], list[int]]:
        self.encoded.append(len(text))
        return super().encode_words(text, add_special=add_special)


@pytest.fixture(scope="module")
def counting(smollm_path: Path) -> Counting:
    with GgufFile(smollm_path) as file:
        return Counting.from_gguf(file.metadata)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    memory = TextMemory(tokenizer, least=64, most=20_000)
    texts = ["".join(SENTENCES) * 2]
    for _ in range(6):
        base = data.draw(st.sampled_from(texts))
        kept = base[: data.draw(st.integers(0, len(base)))]
        texts.append(kept + "".join(data.draw(pieces)))
        for add_special in (False, True):
            expected = tokenizer.encode(texts[-1], add_special=add_special)
            assert memory.encode(texts[-1], add_special=add_special) == expected


def test_words_end_where_ids_can_be_cut(tokenizer: Tokenizer) -> None:
    text = "".join(SENTENCES) * 2
    ids, index, ends = tokenizer.encode_words(text, add_special=False)
    assert ids == tokenizer.encode(text, add_special=False)
    if tokenizer.rule.byte_level:
        assert len(index) > 20
        for i, end in zip(index, ends, strict=True):
            assert tokenizer.encode(text[:end], add_special=False) == ids[:i]
            assert tokenizer.encode(text[end:], add_special=False) == ids[i:]


def test_turns_and_branches_encode_what_is_new(counting: Counting) -> None:
    memory = TextMemory(counting)
    prompt = "The cat sat on the mat, and then it went for a walk. " * 400
    turns = [prompt + "answer number one. " * i for i in range(1, 6)]
    branches = [turns[-1] + f"Branch {i}: consider the {i}th idea." for i in range(8)]
    for text in turns + branches:
        assert memory.encode(text, add_special=True) == counting.encode(text, add_special=True)
    first, *others = counting.encoded
    assert first == len(turns[0]) and len(others) == len(turns + branches) - 1
    assert max(others) < 600
    memory.encode(turns[0], add_special=True, owner="another")
    assert counting.encoded[-1] == len(turns[0])


def test_an_edit_is_encoded_though_the_same_follows(counting: Counting) -> None:
    memory = TextMemory(counting)
    text = "The cat sat on the mat, and then it went for a walk. " * 400
    memory.encode(text, add_special=False)
    for at in range(8000, 8060):
        edited = text[:at] + "Z" + text[at + 1 :]
        assert memory.encode(edited, add_special=False) == counting.encode(edited, add_special=False)


def test_what_was_used_longest_ago_is_forgotten(counting: Counting) -> None:
    memory = TextMemory(counting, most=55_000)
    first, second, third = (f"{name} text of some length. " * 1000 for name in ("one", "two", "three"))
    for text in (first, second, third):
        memory.encode(text, add_special=False)
    counting.encoded.clear()
    memory.encode(first, add_special=False)
    memory.encode(third, add_special=False)
    assert counting.encoded[0] == len(first) and counting.encoded[1] < 1000


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_pieces_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    memory = TextMemory(tokenizer, least=64, piece=data.draw(st.integers(300, 900)))
    text = "".join(data.draw(st.lists(st.sampled_from([*SENTENCES, "x" * 400, " " * 300, "12345" * 80]), max_size=80)))
    expected = tokenizer.encode(text, add_special=True)
    assert memory.encode(text, add_special=True) == expected
    most = data.draw(st.integers(1, len(expected) + 1))
    fresh = TextMemory(tokenizer, least=64, piece=500)
    assert fresh.encode(text, add_special=True, bound=Bound(most, "begin"))[:most] == expected[:most]
    assert fresh.encode(text, add_special=True, bound=Bound(most, "end"))[-most:] == expected[-most:]
    assert fresh.encode(text, add_special=True) == expected


def test_a_text_is_encoded_until_the_context_is_full(counting: Counting) -> None:
    text = "The cat sat on the mat, and then it went for a walk. " * 10_000
    counting.encoded.clear()
    with pytest.raises(InvalidRequest, match="more than 1000 tokens") as refusal:
        TextMemory(counting).encode(text, add_special=True, bound=Bound(1000))
    assert refusal.value.code == "context_length_exceeded"
    assert counting.encoded == [PIECE]
    counting.encoded.clear()
    TextMemory(counting).encode(text, add_special=True, bound=Bound(20_000, "begin"))
    assert sum(counting.encoded) < 3 * PIECE
    counting.encoded.clear()
    ids = TextMemory(counting).encode(text, add_special=True, bound=Bound(1000, "end"))
    assert len(ids) < PIECE and max(counting.encoded) <= PIECE


def test_a_text_that_cannot_fit_is_known_by_its_bytes(smollm: Tokenizer) -> None:
    n = smollm.least_ids("x" * 8100)
    assert n >= 100
    check_size("x" * 8100, smollm, Bound(n))
    check_size("x" * 8100, smollm, Bound(1, "end"))
    with pytest.raises(InvalidRequest, match=f"at least {n} tokens") as refusal:
        check_size("x" * 8100, smollm, Bound(n - 1))
    assert refusal.value.code == "context_length_exceeded"
    assert smollm.least_ids("\x04" * 1000) == 0 == len(smollm.encode("\x04" * 1000, add_special=False))


def test_a_text_has_as_many_ids_as_its_bytes_need(tokenizer: Tokenizer) -> None:
    for text in [*SENTENCES, "e\u0301" * 50, "\u1112\u1161\u11ab" * 50, "▁" * 200, " " * 200, "\x04\x16" * 9]:
        assert tokenizer.least_ids(text) <= len(tokenizer.encode(text, add_special=False))
