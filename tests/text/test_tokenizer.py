"""Ids and texts are those of the models' own tokenizers; special tokens act only where they may."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast
from tokenizers import pre_tokenizers

from bough.base.errors import ConfigError, InvalidRequest
from bough.text.tokenizer import Tokenizer
from bough.text.word_split import STYLES


def test_default_model_agrees_with_transformers(smollm: Tokenizer, smollm_path: Path, strings: list[str]) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(smollm_path.parent, gguf_file=smollm_path.name)
    strings = [*strings, "<|im_start|>user\nhi<|im_end|>\n", "a<|endoftext|>b <|im_end|> c"]
    assert len(strings) > 500
    ids = {text: smollm.encode(text, add_special=True) for text in strings}
    # transformers leaves out the model's rule that every digit is a word; where it shows, it is put in below.
    plain = [text for text in strings if not any(c.isnumeric() for c in text)]
    assert len(plain) > 300 and [ids[text] for text in plain] == [oracle.encode(text) for text in plain]
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    assert list(ids.values()) == [oracle.encode(text) for text in ids]
    for skip in (False, True):
        for row in ids.values():
            expected = oracle.decode(row, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert smollm.decode(row, skip_special=skip) == expected
    assert smollm.vocab_size == len(oracle) and smollm.eos_ids[0] == oracle.eos_token_id


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece-first", "sentencepiece-never", "sentencepiece-legacy"])
def test_folder_agrees_with_transformers(kind: str, folders: dict[str, Path], strings: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(folders[kind])
    ours = Tokenizer.from_folder(folders[kind])
    for add_special in (False, True):
        for text in strings:
            ids = ours.encode(text, add_special=add_special)
            assert ids == oracle.encode(text, add_special_tokens=add_special)
            for skip in (False, True):
                assert ours.decode(ids, skip_special=skip) == oracle.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token, ours.eos_token, ours.bos_id) == ("<s>", "</s>", oracle.bos_token_id)
    assert ours.special_ids == frozenset(i for i, t in oracle.added_tokens_decoder.items() if t.special)


def test_plain_text_has_no_special_ids_and_comes_back(tokenizer: Tokenizer, strings: list[str]) -> None:
    unknown = tokenizer.token_id("<unk>")
    for text in strings:
        for token in tokenizer.special_tokens:
            for mixed in (text + token, token + text, text + " " + token + " " + text):
                ids = tokenizer.encode_plain(mixed)
                assert not (tokenizer.special_ids - {unknown}) & set(ids)
                if "sentencepiece" in repr(tokenizer.rule) or not tokenizer.rule.byte_level:
                    continue
                assert tokenizer.decode(ids, skip_special=False) == mixed or "\u0301" in mixed or not _is_nfc(mixed)
        if not any(token in text for token in tokenizer.special_tokens):
            assert tokenizer.encode_plain(text) == tokenizer.encode(text, add_special=False)


def _is_nfc(text: str) -> bool:
    import unicodedata

    return unicodedata.is_normalized("NFC", text)


def test_token_bytes_join_to_the_text(tokenizer: Tokenizer, strings: list[str]) -> None:
    for text in strings:
        ids = tokenizer.encode_bare(text)
        joined = b"".join(tokenizer.token_bytes(i) for i in ids).decode("utf-8", "replace")
        assert joined == text or not _is_nfc(text) or not tokenizer.rule.byte_level
        assert all(tokenizer.token_text(i) == tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids)
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_encoding_runs_beside_other_threads(smollm: Tokenizer) -> None:
    text = "Some words of a long document, 12 numbers. " * 25_000
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(len(smollm.encode(text, add_special=False))))
    thread.start()
    turns = 0
    while not done:
        turns += 1
    thread.join()
    # Encoding takes some tenths of a second; with the interpreter lock held, this loop would hardly turn.
    assert turns > 10_000 and done[0] > 100_000


def test_threads_get_the_same_ids(tokenizer: Tokenizer, strings: list[str]) -> None:
    expected = [tokenizer.encode(text, add_special=True) for text in strings]
    results: list[list[list[int]]] = []

    def work() -> None:
        results.append([tokenizer.encode(text, add_special=True) for text in strings])
        [tokenizer.encode_plain(text) for text in strings[:100]]

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4


def test_broken_unicode_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode_plain, lambda text: tokenizer.encode(text, add_special=True)):
        with pytest.raises(InvalidRequest, match="Unicode"):
            encode("a\ud800b")


# ---- GGUF


def _sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = [
        "▁",
        *"abcdehlo",
        "he",
        "ll",
        "▁he",
        "llo",
        "▁hello",
        "ab",
        "abc",
        "bc",
        "▁a",
        "<s",
        "s>",
        "<",
        "s",
        ">",
        "el",
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *pieces, "<|end|>", "▁▁"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 3, 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0, 0.0]
    data: dict[str, Any] = {
        "model": "llama", "tokens": tokens, "token_type": np.array(types, np.int32),
        "scores": np.array(scores, np.float32),
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in {**data, **changes}.items() if value is not None}


def _greedy_by_score(text: str, metadata: dict[str, Any]) -> list[int]:
    """Sentencepiece's rule, slowly: join the best scoring neighbours, the leftmost among equals."""
    tokens, scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    ids = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ids]
        if not joins:
            break
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found = []
    for part in parts:
        found += [ids[part]] if part in ids else [tokens.index(f"<0x{byte:02X}>") for byte in part.encode()]
    return found


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abcdehlo <s>é😀", max_size=24).filter(lambda t: "  " not in " " + t))
def test_sentencepiece_gguf_agrees_with_the_slow_rule(text: str) -> None:
    metadata = _sentencepiece_metadata()
    ours = _cached(metadata)
    assert ours.encode_plain(text) == _greedy_by_score(text, metadata)
    assert ours.decode(ours.encode_plain(text)) == text


_CACHE: list[Tokenizer] = []


def _cached(metadata: dict[str, Any]) -> Tokenizer:
    if not _CACHE:
        _CACHE.append(Tokenizer.from_gguf(metadata))
    return _CACHE[0]


def test_sentencepiece_gguf_frame_and_ends() -> None:
    ours = Tokenizer.from_gguf(_sentencepiece_metadata())
    assert ours.encode("hello", add_special=True)[0] == ours.bos_id == 1
    assert ours.eos_ids == (2, ours.token_id("<|end|>"))
    assert ours.special_ids == {0, 1, 2, ours.token_id("<|end|>")}
    bare = Tokenizer.from_gguf(_sentencepiece_metadata(add_bos_token=False, add_eos_token=True, add_space_prefix=False))
    assert bare.encode("he", add_special=True) == [bare.token_id("he"), 2]
    # A run of spaces is one user-defined piece, and it is text.
    assert ours.token_id("▁▁") in ours.encode_plain("a▁▁b") and ours.token_id("▁▁") not in ours.special_ids


@pytest.mark.parametrize("style", list(STYLES))
def test_every_style_keeps_every_byte(style: str, smollm_metadata: dict[str, Any], strings: list[str]) -> None:
    ours = Tokenizer.from_gguf({**smollm_metadata, "tokenizer.ggml.pre": style})
    for text in strings[::7]:
        assert ours.decode(ours.encode_plain(text), skip_special=False) == text


@pytest.mark.parametrize(
    ("style", "text", "words"),
    [
        ("gpt-2", "it's 1234  x\n\ny", ["it", "'s", " 1234", " ", " x", "\n", "\n", "y"]),
        ("smollm", "a 1234", ["a", " ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", " ", "123", "4", "\n\n", " x"]),
        ("qwen2", "IT'S 123(a", ["IT", "'S", " ", "1", "2", "3", "(a"]),
        ("seed-coder", "IT'S 12 (a);\nb", ["IT", "'S", " ", "1", "2", " (", "a", ");", "\n", "b"]),
        ("deepseek-v3", "1234日本", ["123", "4", "日本"]),
        ("tekken", "camelCase a/\nb", ["camel", "Case", " a", "/\n", "b"]),
        ("gpt-4o", "don't 1234", ["don't", " ", "123", "4"]),
        ("deepseek-llm", "Hi ÄÖ 12\n日本(a)  ", ["Hi", " ÄÖ", " ", "1", "2", "\n", "日本", "(", "a", ")", "  "]),
        ("deepseek-llm", "a ა𝔘b", ["a", " ", "ა", "𝔘", "b"]),
        ("kimi-k2", "日本ab's 1234/\n", ["日本", "ab's", " ", "123", "4", "/\n"]),
        ("youtu", "日本，한국 ab 12", ["日本", "，", "한국", " ab", " ", "1", "2"]),
        ("tiny_aya", "a 1234567", ["a", " ", "1", "234", "567"]),
        ("superbpe", "a b1234567", ["a b", "1", "234", "567"]),
        ("viking", "ab, cd12", ["ab", ",", " cd", "1", "2"]),
        ("minicpm5", "ab 1234", ["ab", " ", "123", "4"]),
    ],
)
def test_styles_cut_where_their_models_do(style: str, text: str, words: list[str]) -> None:
    from bough.text.word_split import word_split

    cut = word_split(style, add_prefix_space=False).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "'rwkv' is not supported"),
        ({"model": "bert"}, r"no \[CLS\]|no \[SEP\]"),
        ({"model": "gpt2", "pre": "mystery"}, "'mystery' is not known"),
        ({"scores": np.zeros(3)}, "scores do not match"),
        ({"token_type": [1]}, "types do not match"),
        ({"tokens": []}, "types do not match"),
        ({"eos_token_id": 10**6}, "not the id of a token"),
        ({"bos_token_id": 1.0}, "not the id of a token"),
        ({"add_bos_token": "yes"}, "neither true nor false"),
        ({"tokens": 5}, "not a list of str"),
        ({"token_type": ["a"]}, "not a list of int"),
        ({"scores": np.full(300, np.nan)}, "scores do not match"),
        ({"precompiled_charsmap": 1 << 40}, "no list of bytes"),
        ({"precompiled_charsmap": np.zeros(16, np.uint8)}, "normalised characters is damaged"),
        ({"model": "t5", "unknown_token_id": None}, "no unknown_token_id"),
        ({"model": "gpt2", "merges": ["ab"]}, "not a pair"),
        ({"model": "gpt2", "merges": ["zz yy"]}, "is broken"),
    ],
)
def test_bad_gguf_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_gguf(_sentencepiece_metadata(**changes))


# ---- folders


def test_ends_come_from_all_files(folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folders["byte-level"] / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (4, 3, 2)


def test_tokens_declared_elsewhere_are_added(folders: dict[str, Path], tmp_path: Path) -> None:
    fast = Fast.from_file(str(folders["byte-level"] / "tokenizer.json"))
    fast.save(str(tmp_path / "tokenizer.json"))
    config = {
        "eos_token": {"content": "<end>"}, "extra_special_tokens": ["<extra>"],
        "added_tokens_decoder": {"900": {"content": "<soft>", "special": False},
                                 "7": {"content": "<tool_call>", "special": True}},
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.from_folder(tmp_path)
    assert {"<end>", "<extra>", "<tool_call>"} <= set(ours.special_tokens) and "<soft>" not in ours.special_tokens
    assert ours.eos_ids == (ours.token_id("<end>"),)
    assert ours.encode("x<end>", add_special=False)[-1] == ours.eos_ids[0] not in ours.encode_plain("x<end>")


def test_broken_folders_are_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="not a valid tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folders["byte-level"] / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ConfigError, match="eos_token_id"):
        Tokenizer.from_folder(tmp_path)
    data = json.loads((folders["byte-level"] / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**data, "decoder": {"type": "CTC", "pad_token": "x",
                                             "word_delimiter_token": "|", "cleanup": True}}))  # fmt: skip
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(ConfigError, match="CTC"):
        Tokenizer.from_folder(tmp_path)
