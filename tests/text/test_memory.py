"""Texts that begin like earlier ones get the ids of the whole text, and little of them is encoded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Fast

from bough.base.errors import InvalidRequest
from bough.base.plan import Ints
from bough.text.memory import PIECE, Bound, Steps, TextMemory, check_size
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

    def encode_words(self, text: str, *, plain: bool = False) -> tuple[Ints, Ints, Ints]:
        self.encoded.append(len(text))
        return super().encode_words(text, plain=plain)


def encoded(steps: Steps[list[int]]) -> list[int]:
    """What ``steps`` return when all of them are done."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            ids: list[int] = end.value
            return ids


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
            assert encoded(memory.encode(texts[-1], add_special=add_special)) == expected


def test_words_end_where_ids_can_be_cut(tokenizer: Tokenizer) -> None:
    text = "".join(SENTENCES) * 2
    ids, index, ends = (each.tolist() for each in tokenizer.encode_words(text))
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
        assert encoded(memory.encode(text, add_special=True)) == counting.encode(text, add_special=True)
    first, *others = counting.encoded
    assert first == len(turns[0]) and len(others) == len(turns + branches) - 1
    assert max(others) < 600
    encoded(memory.encode(turns[0], add_special=True, owner="another"))
    assert counting.encoded[-1] == len(turns[0])


def test_of_many_texts_the_one_with_most_in_common_is_gone_on_with(counting: Counting) -> None:
    memory = TextMemory(counting)
    prompt = "The cat sat on the mat, and then it went for a walk. " * 100
    branches = [prompt + f"Question {i}: " + f"what is the {i}th idea of the cat? " * 60 for i in range(40)]
    for text in branches:
        encoded(memory.encode(text, add_special=False))
    counting.encoded.clear()
    # What goes on comes behind its beginning where texts are sorted, what leaves it at an earlier letter before it.
    for going_on in (text[:at] + "And why?" for text in branches[::3] for at in (len(text), -300)):
        assert encoded(memory.encode(going_on, add_special=False)) == counting.encode(going_on, add_special=False)
    assert max(counting.encoded) < 700


def test_an_edit_is_encoded_though_the_same_follows(counting: Counting) -> None:
    memory = TextMemory(counting)
    text = "The cat sat on the mat, and then it went for a walk. " * 400
    encoded(memory.encode(text, add_special=False))
    for at in range(8000, 8060):
        edited = text[:at] + "Z" + text[at + 1 :]
        assert encoded(memory.encode(edited, add_special=False)) == counting.encode(edited, add_special=False)


def test_what_was_used_longest_ago_is_forgotten(counting: Counting) -> None:
    memory = TextMemory(counting, most=55_000)
    first, second, third = (f"{name} text of some length. " * 1000 for name in ("one", "two", "three"))
    for text in (first, second, third):
        encoded(memory.encode(text, add_special=False))
    counting.encoded.clear()
    encoded(memory.encode(first, add_special=False))
    encoded(memory.encode(third, add_special=False))
    assert counting.encoded[0] == len(first) and counting.encoded[1] < 1000


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_pieces_of_a_long_text_have_the_ids_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    memory = TextMemory(tokenizer, least=64, piece=data.draw(st.integers(300, 900)))
    text = "".join(data.draw(st.lists(st.sampled_from([*SENTENCES, "x" * 400, " " * 300, "12345" * 80]), max_size=80)))
    expected = tokenizer.encode(text, add_special=True)
    assert encoded(memory.encode(text, add_special=True)) == expected
    most = data.draw(st.integers(1, len(expected) + 1))
    fresh = TextMemory(tokenizer, least=64, piece=500)
    assert encoded(fresh.encode(text, add_special=True, bound=Bound(most, "begin")))[:most] == expected[:most]
    assert encoded(fresh.encode(text, add_special=True, bound=Bound(most, "end")))[-most:] == expected[-most:]
    assert encoded(fresh.encode(text, add_special=True)) == expected


def test_a_text_is_encoded_until_the_context_is_full(counting: Counting) -> None:
    text = "The cat sat on the mat, and then it went for a walk. " * 10_000
    counting.encoded.clear()
    with pytest.raises(InvalidRequest, match="more than 1000 tokens") as refusal:
        encoded(TextMemory(counting).encode(text, add_special=True, bound=Bound(1000)))
    assert refusal.value.code == "context_length_exceeded"
    assert counting.encoded == [PIECE]
    counting.encoded.clear()
    encoded(TextMemory(counting).encode(text, add_special=True, bound=Bound(20_000, "begin")))
    assert sum(counting.encoded) < 3 * PIECE
    counting.encoded.clear()
    ids = encoded(TextMemory(counting).encode(text, add_special=True, bound=Bound(1000, "end")))
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


def _wordpiece() -> Fast:
    fast = Fast(models.WordPiece(unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    fast.train_from_iterator(SENTENCES, trainer)
    fast.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return fast


def _roberta() -> Fast:
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(SENTENCES, trainer)
    fast.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    return fast


def _unigram() -> Fast:
    fast = Fast(models.Unigram())
    fast.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    fast.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    fast.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return fast


ENCODERS = {"wordpiece": _wordpiece, "roberta": _roberta, "unigram": _unigram}


@pytest.fixture(scope="module", params=list(ENCODERS))
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the vocabulary of a model that reads texts, and pairs of them, between special tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    ENCODERS[request.param]().save(str(folder / "tokenizer.json"))
    names = {"wordpiece": ("[UNK]", "[PAD]"), "roberta": ("<s>", "<pad>"), "unigram": ("<unk>", "<pad>")}[request.param]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": names[0], "pad_token": names[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_cut_texts_are_those_of_transformers(encoder: Path, data: st.DataObject) -> None:
    from transformers import PreTrainedTokenizerFast

    reference, tokenizer = PreTrainedTokenizerFast.from_pretrained(encoder), Tokenizer.from_folder(encoder)
    memory = TextMemory(tokenizer, least=64, piece=data.draw(st.integers(300, 900)))
    text = "".join(data.draw(pieces))
    most, special = data.draw(st.integers(4, 400)), data.draw(st.booleans())
    for side in ("left", "right"):
        reference.truncation_side = side
        expected = reference(text, truncation=True, max_length=most, add_special_tokens=special)["input_ids"]
        steps = memory.encode_cut(text, most, left=side == "left", add_special=special)
        assert encoded(steps) == expected
        assert tokenizer.encode_cut(text, most, left=side == "left", add_special=special) == expected
    if special:
        pair = text.replace("<", "("), text[:300].replace("<", "(") + "a"  # texts of special tokens are text in a pair
        expected = reference(*pair, truncation="longest_first", max_length=most)["input_ids"]
        assert encoded(memory.encode_pair(*pair, most)) == expected
    expected = reference(text, add_special_tokens=special)["input_ids"]
    assert encoded(memory.encode(text, add_special=special)) == expected


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_cut_texts_and_pairs_are_those_of_the_whole(tokenizer: Tokenizer, data: st.DataObject) -> None:
    memory = TextMemory(tokenizer, least=64, piece=data.draw(st.integers(300, 900)))
    _check_cuts(memory, tokenizer, data)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_cuts_within_a_frame_are_those_of_the_whole(encoder: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer.from_folder(encoder)
    memory = TextMemory(tokenizer, least=64, piece=data.draw(st.integers(300, 900)))
    _check_cuts(memory, tokenizer, data)


def _check_cuts(memory: TextMemory, tokenizer: Tokenizer, data: st.DataObject) -> None:
    first, second = ("".join(data.draw(pieces)) for _ in range(2))
    special = data.draw(st.booleans())
    for most in data.draw(st.lists(st.integers(4, 400), min_size=3, max_size=6)):
        for left in (False, True):
            expected = tokenizer.encode_cut(first, most, left=left, add_special=special)
            assert encoded(memory.encode_cut(first, most, left=left, add_special=special)) == expected
        for pair in ((first, second), (second, first), (first, first), (first, first + " a")):
            expected = tokenizer.encode_pair(*pair, most, add_special=special)
            assert encoded(memory.encode_pair(*pair, most, add_special=special)) == expected
    assert encoded(memory.encode_pair(first, second)) == tokenizer.encode_pair(first, second)


def test_of_a_cut_text_as_much_is_encoded_as_its_ids_need(counting: Counting) -> None:
    text = "The cat sat on the mat, and then it went for a walk. " * 10_000
    counting.encoded.clear()
    assert len(encoded(TextMemory(counting).encode_cut(text, 10))) == 10
    assert counting.encoded == [PIECE]
    counting.encoded.clear()
    ids = encoded(TextMemory(counting).encode_pair(text, text, 20_000))
    assert len(ids) == 20_000 and max(counting.encoded) <= PIECE and sum(counting.encoded) < 6 * PIECE


def test_texts_within_a_frame_are_encoded_in_pieces(encoder: Path) -> None:
    memory, text = TextMemory(Tokenizer.from_folder(encoder)), "the lazy dog " * 20_000
    assert max(memory.encode(text, add_special=True)) == PIECE
    assert list(memory.encode_cut(text, 512)) == [PIECE]
    assert max(memory.encode_pair(text, text, 512)) == PIECE


def test_frames_that_have_no_room_are_refused(encoder: Path) -> None:
    tokenizer = Tokenizer.from_folder(encoder)
    memory, text = TextMemory(tokenizer), "word " * 2000
    frame = tokenizer.framed([])
    assert encoded(memory.encode_cut(text, len(frame))) == frame == tokenizer.encode("", add_special=True)
    assert encoded(memory.encode_cut(text, len(frame), left=True)) == frame
    for steps in (memory.encode_cut(text, len(frame) - 1), memory.encode_pair(text, text, len(frame))):
        with pytest.raises(InvalidRequest, match="does not fit into"):
            encoded(steps)
