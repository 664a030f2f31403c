"""Folders with sentencepiece or tiktoken files: ids equal those of the libraries that made them."""

from __future__ import annotations

import base64
import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError, InvalidRequest
from bough.text.decoding import BYTE_OF_CHAR
from bough.text.rank_file import _STYLES
from bough.text.spm_file import spm_metadata
from bough.text.tokenizer import Tokenizer
from bough.text.word_split import STYLES

from .conftest import SENTENCES, varied_strings

sentencepiece = pytest.importorskip("sentencepiece")
tiktoken = pytest.importorskip("tiktoken")

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False},
    "gemma": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "add_dummy_prefix": False, "user_defined_symbols": ["<mask>", "▁▁"]},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "pad_id": 3},
    "unigram-unknown": {"model_type": "unigram", "unk_id": 2, "bos_id": 0, "eos_id": 1},
    "bpe-nfkc": {"model_type": "bpe", "bos_id": -1},
    "bpe-bare": {"model_type": "bpe", "normalization_rule_name": "nfkc", "add_dummy_prefix": False,
                 "remove_extra_whitespaces": True, "split_digits": True, "control_symbols": ["<sep>"]},
    "unigram-bare": {"model_type": "unigram", "normalization_rule_name": "identity", "add_dummy_prefix": False,
                     "remove_extra_whitespaces": False, "byte_fallback": True},
    "unigram-symbols": {"model_type": "unigram", "user_defined_symbols": ["<mask>", "<0>"],
                        "control_symbols": ["<sep>", "and"], "byte_fallback": True},
    "bpe-symbols": {"model_type": "bpe", "user_defined_symbols": ["<mask>", "<0>"], "control_symbols": ["and"]},
    "unigram-phrases": {"model_type": "unigram", "split_by_whitespace": False, "split_by_unicode_script": False},
}  # fmt: skip


def trained(options: dict[str, Any]) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in varied_strings(400) for line in text.split("\n")]),
        model_writer=written, vocab_size=1300, hard_vocab_limit=False, character_coverage=0.98, minloglevel=2,
        num_threads=1, **options,
    )  # fmt: skip
    return written.getvalue()


@pytest.fixture(scope="module", params=KINDS)
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    data = trained(KINDS[request.param])
    (folder / "tokenizer.model").write_bytes(data)
    return folder, sentencepiece.SentencePieceProcessor(model_proto=data)


def test_ids_are_sentencepieces(spm: tuple[Path, Any], strings: list[str]) -> None:
    folder, theirs = spm
    ours = Tokenizer.from_folder(folder)
    assert ours.vocab_size == theirs.vocab_size()
    n_other = 0
    for text in [*SENTENCES, *strings]:
        ids = theirs.encode(text)
        found = ours.encode_plain(text)
        if found != ids:
            # Sentencepiece adds scores up in float32, so that of ways that are equally likely it may take another.
            scores = [sum(map(theirs.get_score, way)) for way in (found, ids)]
            assert folder.name.startswith("unigram") and scores[0] == pytest.approx(scores[1], abs=1e-3), repr(text)
            n_other += 1
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)
    assert n_other <= 5


def test_the_frame_is_what_the_config_says(spm: tuple[Path, Any], tmp_path: Path) -> None:
    folder, theirs = spm
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    config = {"add_bos_token": True, "add_eos_token": True, "eos_token": "</s>", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = Tokenizer.from_folder(tmp_path).encode("hello", add_special=True)
    begin = [theirs.bos_id()] if theirs.bos_id() >= 0 else []
    assert ids == [*begin, *theirs.encode("hello"), theirs.eos_id()]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=6), st.integers(0, 3000))
def test_damaged_models_are_errors_or_load(edits: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(_small_model())
    for at, byte in edits:
        data[at % len(data)] = byte
    path = _FOLDER[0] / "tokenizer.model"
    path.write_bytes(bytes(data[: max(1, cut % len(data))] if cut % 3 == 0 else data))
    try:
        Tokenizer.from_folder(path.parent).encode_plain("hello")
    except (ConfigError, InvalidRequest):
        pass


_FOLDER: list[Path] = []


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    _FOLDER[:] = [tmp_path_factory.mktemp("damaged")]


def _small_model() -> bytes:
    """Five pieces, written by hand: (number << 3 | type, value)."""

    def piece(text: str, score: float, kind: int) -> bytes:
        body = b"\x0a" + bytes([len(text.encode())]) + text.encode() + b"\x15" + struct.pack("<f", score)
        body += b"\x18" + bytes([kind])
        return b"\x0a" + bytes([len(body)]) + body

    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -1.0, 1), ("h", -2.0, 1), ("▁h", -0.5, 1)]
    return b"".join(piece(*p) for p in pieces) + b"\x12\x02\x18\x02" + b"\x1a\x02\x18\x01"


def test_the_wire_format_by_hand(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(_small_model())
    data = spm_metadata(tmp_path / "tokenizer.model")
    assert data["tokenizer.ggml.model"] == "llama" and data["tokenizer.ggml.token_type"] == [2, 3, 3, 1, 1, 1]
    assert Tokenizer.from_folder(tmp_path).encode_plain("h h") == [5, 5]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """The vocabulary of a byte-level BPE, by rank."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import models, pre_tokenizers, trainers

    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        varied_strings(400), trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    by_id = sorted(fast.get_vocab().items(), key=lambda item: item[1])
    return {bytes(BYTE_OF_CHAR[char] for char in token): rank for rank, (token, _) in enumerate(by_id)}


@pytest.mark.parametrize("name", _STYLES)
def test_ids_are_tiktokens(name: str, ranks: dict[bytes, int], strings: list[str], tmp_path: Path) -> None:
    file = tmp_path / (f"{name}.model" if name == "tokenizer" else f"{name}.tiktoken")
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    file.write_text("".join(lines))
    added = {str(len(ranks)): {"content": "<|im_end|>", "special": True}}
    config = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    (pattern,) = STYLES[_STYLES[name]]
    theirs = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|im_end|>": len(ranks)})
    for text in [*SENTENCES, *strings]:
        ids = theirs.encode_ordinary(text)
        assert ours.encode_plain(text) == ids and ours.decode(ids) == text
    assert ours.encode("x<|im_end|>", add_special=True)[-1] == len(ranks) == ours.eos_ids[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other.tiktoken", "IQ== 0\n", "cut words"),
        ("qwen.tiktoken", "IQ== 0\nIg== 2\n", "ranks are not"),
        ("qwen.tiktoken", "IQ== 0\n!!== 1\n", "cannot be read|can be read"),
        ("tokenizer.model", "\x08\x01", "can be read"),
        ("tokenizer.model", "", "can be read"),
    ],
)
def test_what_cannot_be_read_is_refused(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(tmp_path)
