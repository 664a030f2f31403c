"""Damaged vocabularies of GGUF files: each one is refused, or every text can be encoded and decoded."""

from __future__ import annotations

import copy
import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from bough.base.errors import ConfigError, InvalidRequest
from bough.text.charsmap import check_charsmap
from bough.text.decoding import BYTE_OF_CHAR
from bough.text.spm_file import spm_metadata
from bough.text.tokenizer import Tokenizer


def _spm(kind: str) -> dict[str, Any]:
    pieces = ["▁", "a", "b", "c", "ab", "abc", "▁a", "▁ab", "é", "日", "<x>", "▁▁"]
    return {
        "model": kind, "tokens": ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces],
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 10, 4, 4], "scores": [0.0] * 259 + [-float(i) for i in range(12)],
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True, "add_space_prefix": True,
    }  # fmt: skip


def _gpt2(style: str) -> dict[str, Any]:
    tokens = [*BYTE_OF_CHAR, "ab", "abc", "Ġa", "<|im_end|>", "<|endoftext|>"]
    return {
        "model": "gpt2", "pre": style, "tokens": tokens, "token_type": [1] * (len(tokens) - 2) + [3, 3],
        "merges": ["a b", "ab c", "Ġ a"], "eos_token_id": len(tokens) - 1, "bos_token_id": len(tokens) - 2,
    }  # fmt: skip


BERT = {
    "model": "bert", "tokens": ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁a", "▁b", "c", "▁hello"],
    "token_type": [3, 3, 3, 3, 1, 1, 1, 1], "unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3,
}  # fmt: skip
VOCABULARIES = [_spm("llama"), _spm("t5"), _gpt2("qwen2"), _gpt2("default"), _gpt2("llama-bpe"), BERT]
KEYS = [
    "model", "pre", "tokens", "token_type", "merges", "scores", "precompiled_charsmap", "remove_extra_whitespaces",
    "add_space_prefix", "add_bos_token", "add_eos_token", "add_sep_token", "normalizer.lowercase",
    "bos_token_id", "eos_token_id", "eot_token_id", "cls_token_id", "seperator_token_id", "unknown_token_id",
]  # fmt: skip
ODD = [
    None, -1, 0, 1, 1 << 31, 1 << 63, -1 << 63, 1.5, float("nan"), float("inf"), "", "a", "\0", "😀", "a b", "$A",
    ":1", " ", "\udc80", True, False, b"x", np.zeros(3), np.array([1, 300]), np.zeros(16, np.uint8), [], [1], ["a"],
    [""] * 5,
]  # fmt: skip

edits = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from(["set", "drop", "item", "remove", "double", "swap"]),
        st.integers(0, 300),
        st.sampled_from(ODD),
    ),
    min_size=1,
    max_size=4,
)


def _damaged(vocabulary: dict[str, Any], changes: list[tuple[str, str, int, Any]]) -> dict[str, Any]:
    data = copy.deepcopy(vocabulary)
    for key, how, at, odd in changes:
        value = data.get(key)
        if how == "drop":
            data.pop(key, None)
        elif how == "set" or not isinstance(value, list) or not value:
            data[key] = odd
        elif how == "item":
            value[at % len(value)] = odd
        elif how == "remove":
            del value[at % len(value)]
        elif how == "double":
            value.insert(at % len(value), value[at * 7 % len(value)])
        else:
            i, j = at % len(value), at * 7 % len(value)
            value[i], value[j] = value[j], value[i]
    return {f"tokenizer.ggml.{key}": value for key, value in data.items()}


@pytest.mark.parametrize("examples", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_damaged_vocabularies_are_errors_or_serve(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(VOCABULARIES), edits)
    def check(vocabulary: dict[str, Any], changes: list[tuple[str, str, int, Any]]) -> None:
        try:
            tokenizer = Tokenizer.from_gguf(_damaged(vocabulary, changes))
        except ConfigError:
            return
        for text in ("abc hello é日 \0 😀 <x><|im_end|>  ", ""):
            tokenizer.decode(tokenizer.encode(text, add_special=True))
            try:
                tokenizer.encode_plain(text)
            except InvalidRequest as error:
                assert "cannot be encoded as ordinary text" in error.message

    check()


# ---- the table by which sentencepiece normalises


@cache
def _charsmap(folder: Path) -> bytes:
    """A small table, as sentencepiece writes it."""
    sentencepiece = pytest.importorskip("sentencepiece")
    rules = {"A": "a", "AB": "b c", "ﬁ": "fi", "日本": "x", "😀": ":)", "é": ""}
    lines = [" ".join(f"{ord(c):X}" for c in a) + "\t" + " ".join(f"{ord(c):X}" for c in b) for a, b in rules.items()]
    (folder / "rules.tsv").write_text("\n".join(lines) + "\n")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f g"] * 9), model_writer=written, vocab_size=12, minloglevel=2,
        normalization_rule_tsv=str(folder / "rules.tsv"), num_threads=1, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "small.model").write_bytes(written.getvalue())
    found: bytes = spm_metadata(folder / "small.model")["tokenizer.ggml.precompiled_charsmap"]
    return found


ALPHABET = [*map(chr, range(1, 128)), *"éßﬁﬂ日本語Ωж߿ࠀ￿😀𝔘\U0010ffff"]


@pytest.mark.parametrize("examples", [300, pytest.param(4000, marks=pytest.mark.slow)])
def test_every_text_can_be_looked_up_in_a_table_that_passes(examples: int, tmp_path_factory: Any) -> None:
    table = _charsmap(tmp_path_factory.mktemp("charsmap"))
    check_charsmap(table)
    assert normalizers.Precompiled(table).normalize_str("A ﬁ é") == "a fi "
    passed = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4),
        st.lists(st.text(st.sampled_from(ALPHABET), max_size=4), max_size=20),
    )
    def check(changes: list[tuple[int, int]], texts: list[str]) -> None:
        nonlocal passed
        data = bytearray(table)
        for at, byte in changes:
            data[at % len(data)] = byte
        try:
            check_charsmap(bytes(data))
        except ConfigError:
            return
        passed += 1
        normalizer = normalizers.Precompiled(bytes(data))
        for text in [*ALPHABET, *texts]:
            normalizer.normalize_str(text)

    check()
    assert examples // 20 < passed < examples


@pytest.mark.parametrize("data", [
    b"\0", bytes(16), b"\4\0\0\0" + bytes(4), (1 << 31).to_bytes(4, "little") + bytes(2000),
    (1024).to_bytes(4, "little") + b"\xff" * 1024, (1024).to_bytes(4, "little") + bytes(1024) + b"\xff",
])  # fmt: skip
def test_tables_that_lead_nowhere_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="is damaged"):
        check_charsmap(data)
