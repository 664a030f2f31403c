"""Texts that begin like earlier ones get the ids of the whole text, and little of them is encoded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.text.memory import TextMemory
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
