"""Builds a tokenizer from the metadata of a GGUF file.

Four kinds are served: ``gpt2``, a byte-level BPE with merges and a named way of cutting text into words, ``llama``, a
sentencepiece BPE whose merges follow from the scores of its pieces, ``t5``, a sentencepiece unigram model (Kudo 2018),
both with byte fallback where the vocabulary has bytes, and ``bert``, the WordPiece of BERT (Devlin et al. 2019). The
format is that of the GGUF specification and of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from bough.base.errors import ConfigError
from bough.text.charsmap import check_charsmap
from bough.text.vocabulary import Vocabulary
from bough.text.word_split import word_split

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BEGINS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "pixtral", "midm-2.0")
_WHOLE_WORDS = (*_BEGINS_BY_DEFAULT, "youtu", "minicpm5")

_EXTRA_SPACES = r"\A +|(?<= ) +| +\z"
_NEVER = -1e6
"""Score of pieces that are never chosen for a text."""

_END_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
)  # fmt: skip
"""Control tokens that end an answer. Many files name only one of their model's in ``eos_token_id``."""


def build_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Build the tokenizer described by the ``tokenizer.ggml.*`` entries of ``metadata``.

    Lists may be Python lists or numpy arrays. Raises ConfigError for kinds that are not served and for
    entries that contradict each other.
    """
    data = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    try:
        return _build(data)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"the GGUF file's tokenizer is broken: {error}") from error


def _build(data: Mapping[str, Any]) -> Vocabulary:
    kind = data.get("model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama", "t5", "bert"):
        raise ConfigError(f"the GGUF tokenizer kind {kind!r} is not supported; gpt2, llama, t5 and bert are")
    tokens = _list(data, "tokens", str)
    types = _list(data, "token_type", int) or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ConfigError("the GGUF file's tokens and token types do not match")
    if kind == "bert":
        tokens = _word_pieces(tokens, types)
        data = {**data, **_frame_of_bert(data, tokens)}
        tokenizer = _build_bert(data, tokens)
    else:
        tokenizer = _build_gpt2(data, tokens) if kind == "gpt2" else _build_spm(data, tokens, types, kind)
    _add_tokens(tokenizer, tokens, types)
    _set_frame(tokenizer, data, tokens, kind)
    unknown = _special_id(data, "unknown_token_id", tokens)
    return Vocabulary(tokenizer, _eos_ids(data, tokens, types), _special_id(data, "bos_token_id", tokens), unknown)


def _build_gpt2(data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = data.get("pre", "default")
    pairs = [merge.partition(" ") for merge in _list(data, "merges", str)]
    if not all(left and right for left, _, right in pairs):
        raise ConfigError("the GGUF file has a merge that is not a pair")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=[(left, right) for left, _, right in pairs], ignore_merges=name in _WHOLE_WORDS
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = word_split(name, add_prefix_space=_flag(data, "add_space_prefix", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_spm(data: Mapping[str, Any], tokens: list[str], types: list[int], kind: str) -> tokenizers.Tokenizer:
    scores = _list(data, "scores", float, int)
    if len(scores) != len(tokens) or not all(map(math.isfinite, scores)):
        raise ConfigError("the GGUF file's tokens and scores do not match")
    unknown, has_bytes = _special_id(data, "unknown_token_id", tokens), _BYTE in types
    if kind == "t5":
        if unknown is None:
            raise ConfigError("the GGUF file's tokenizer has no unknown_token_id")
        model: Any = models.Unigram(list(zip(tokens, _free_scores(types, scores))), unknown, has_bytes)
    else:
        model = models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges_from_scores(tokens, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    tokenizer = tokenizers.Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    strip: list[Any] = []
    if _flag(data, "add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    if _flag(data, "remove_extra_whitespaces", False):
        steps.insert(0, normalizers.Replace(Regex(_EXTRA_SPACES), ""))
    if charsmap := _bytes(data, "precompiled_charsmap"):
        check_charsmap(charsmap)
        steps.insert(0, normalizers.Precompiled(charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _free_scores(types: list[int], scores: list[float]) -> list[float]:
    """Scores with which only ordinary pieces, and what a user defined, are ever chosen."""
    return [score if kind in (_NORMAL, _USER) else _NEVER for kind, score in zip(types, scores, strict=True)]


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece from two pieces, best resulting score first.

    Sentencepiece always joins the neighbours whose joint piece scores best, so the rank of a merge is the
    rank of its result. Only ordinary pieces take part: a control token cannot be spelled.
    """
    joinable = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER, _UNUSED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in joinable.items():
        for cut in range(1, len(token)):
            left, right = joinable.get(token[:cut]), joinable.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], left, right, token[:cut], token[cut:]))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _word_pieces(tokens: list[str], types: list[int]) -> list[str]:
    """The tokens with ``##`` before what continues a word; in files ``▁`` is before what begins one."""
    return [
        token if kind in (_CONTROL, _UNKNOWN) else token[1:] if len(token) > 1 and token[0] == "▁" else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]


def _frame_of_bert(data: Mapping[str, Any], tokens: list[str]) -> dict[str, int | bool]:
    """What the frame of a text is made of, named as for other kinds; ConfigError where a token is not told.

    Older files call the token that begins a text ``cls``.
    """
    named = (
        ("bos", ("bos_token_id", "cls_token_id"), "[CLS]"),
        ("eos", ("seperator_token_id",), "[SEP]"),
        ("unknown", ("unknown_token_id",), "[UNK]"),
    )
    found: dict[str, int | bool] = {"add_bos_token": True, "add_eos_token": True, "add_sep_token": False}
    for name, keys, text in named:
        told = [token_id for key in keys if (token_id := _special_id(data, key, tokens)) is not None]
        if not told and text not in tokens:
            raise ConfigError(f"the GGUF file's tokenizer has no {text}")
        found[f"{name}_token_id"] = told[0] if told else tokens.index(text)
    return found


def _build_bert(data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=tokens[data["unknown_token_id"]]))
    # Most files do not tell; what has the letter A as a word distinguishes case.
    lowercase = _flag(data, "normalizer.lowercase", "A" not in vocab)
    strip_accents = _flag(data, "normalizer.strip_accents", lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Declare control tokens (special) and user-defined ones (matched in any text, and ordinary)."""
    added = [
        AddedToken(token, normalized=False, special=kind in (_CONTROL, _UNKNOWN))
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_CONTROL, _UNKNOWN, _USER)
    ]
    tokenizer.add_tokens(added)


def _set_frame(tokenizer: tokenizers.Tokenizer, data: Mapping[str, Any], tokens: list[str], kind: str) -> None:
    """Tokens put around a text, or two, with ``add_special``."""
    by_default = kind != "gpt2" or data.get("pre") in _BEGINS_BY_DEFAULT
    begin = _framing(data, tokens, "add_bos_token", by_default, "bos_token_id")
    end = _framing(data, tokens, "add_eos_token", False, "eos_token_id")
    between = _framing(data, tokens, "add_sep_token", False, "seperator_token_id")
    if named := {**begin, **end, **between}:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, *between, "$B:1", *(f"{token}:1" for token in end)],
            special_tokens=list(named.items()),
        )


def _framing(data: Mapping[str, Any], tokens: list[str], flag: str, by_default: bool, key: str) -> dict[str, int]:
    """The token ``key`` and its id, or nothing where ``flag`` leaves it out."""
    token_id = _special_id(data, key, tokens) if _flag(data, flag, by_default) else None
    return {} if token_id is None else {tokens[token_id]: token_id}


def _eos_ids(data: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = [_special_id(data, f"{name}_token_id", tokens) for name in ("eos", "eot", "eom")]
    listed = [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_TURN]
    return tuple(dict.fromkeys([i for i in named if i is not None] + listed))


def _special_id(data: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < len(tokens):
        raise ConfigError(f"the GGUF file's {key} is not the id of a token")
    return value


def _flag(data: Mapping[str, Any], key: str, default: bool) -> bool:
    value = data.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"the GGUF file's {key} is neither true nor false")
    return value


def _list(data: Mapping[str, Any], key: str, *types: type) -> list[Any]:
    """The list ``key``, or an empty one; ConfigError if what is in it has other types than ``types``."""
    value = data.get(key, [])
    values = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(values, list) or not set(map(type, values)) <= set(types):
        raise ConfigError(f"the GGUF file's {key} is not a list of {types[0].__name__}")
    return values


def _bytes(data: Mapping[str, Any], key: str) -> bytes:
    value = data.get(key, b"")
    if isinstance(value, np.ndarray) and value.dtype.itemsize == 1:
        return value.tobytes()
    if not isinstance(value, bytes):
        raise ConfigError(f"the GGUF file's {key} is no list of bytes")
    return value
