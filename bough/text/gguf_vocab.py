"""Builds a tokenizer from the metadata of a GGUF file.

Three kinds are served: ``gpt2``, a byte-level BPE with merges and a named way of cutting text into words, ``llama``, a
sentencepiece BPE whose merges follow from the scores of its pieces, and ``t5``, a sentencepiece unigram model (Kudo
2018), both with byte fallback where the vocabulary has bytes. The format is that of the GGUF specification and of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from bough.base.errors import ConfigError
from bough.text.vocabulary import Vocabulary
from bough.text.word_split import word_split

_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_BEGINS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")

_EXTRA_SPACES = r"^ +|(?<= ) +| +$"
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
    kind = data.get("model")
    if kind not in ("gpt2", "llama", "t5"):
        raise ConfigError(f"the GGUF tokenizer kind {kind!r} is not supported; gpt2, llama and t5 are")
    tokens = [str(token) for token in data.get("tokens", ())]
    types = [int(value) for value in data.get("token_type", ())] or [_NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise ConfigError("the GGUF file's tokens and token types do not match")
    try:
        tokenizer = _build_gpt2(data, tokens) if kind == "gpt2" else _build_spm(data, tokens, types, kind)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"the GGUF file's tokenizer is broken: {error}") from error
    _add_tokens(tokenizer, tokens, types)
    _set_frame(tokenizer, data, tokens, kind)
    unknown = _special_id(data, "unknown_token_id", tokens)
    return Vocabulary(tokenizer, _eos_ids(data, tokens, types), _special_id(data, "bos_token_id", tokens), unknown)


def _build_gpt2(data: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    name = data.get("pre", "default")
    pairs = [str(merge).partition(" ") for merge in data.get("merges", ())]
    if not all(left and right for left, _, right in pairs):
        raise ConfigError("the GGUF file has a merge that is not a pair")
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    model = models.BPE(
        vocab=vocab, merges=[(left, right) for left, _, right in pairs], ignore_merges=name in _WHOLE_WORDS
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = word_split(name, add_prefix_space=bool(data.get("add_space_prefix", False)))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_spm(data: Mapping[str, Any], tokens: list[str], types: list[int], kind: str) -> tokenizers.Tokenizer:
    scores = [float(score) for score in data.get("scores", ())]
    if len(scores) != len(tokens):
        raise ConfigError("the GGUF file's tokens and scores do not match")
    unknown, has_bytes = _special_id(data, "unknown_token_id", tokens), _BYTE in types
    if kind == "t5":
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
    if data.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        strip.append(decoders.Strip(" ", 1, 0))
    if data.get("remove_extra_whitespaces", False):
        steps.insert(0, normalizers.Replace(Regex(_EXTRA_SPACES), ""))
    if len(charsmap := bytes(data.get("precompiled_charsmap", b""))):
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


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Declare control tokens (special) and user-defined ones (matched in any text, and ordinary)."""
    added = [
        AddedToken(token, normalized=False, special=kind in (_CONTROL, _UNKNOWN))
        for token, kind in zip(tokens, types, strict=True)
        if token and kind in (_CONTROL, _UNKNOWN, _USER)
    ]
    tokenizer.add_tokens(added)


def _set_frame(tokenizer: tokenizers.Tokenizer, data: Mapping[str, Any], tokens: list[str], kind: str) -> None:
    """Tokens put around a text with ``add_special``."""
    by_default = kind != "gpt2" or data.get("pre") in _BEGINS_BY_DEFAULT
    frame, named = ["$A"], []
    bos, eos = _special_id(data, "bos_token_id", tokens), _special_id(data, "eos_token_id", tokens)
    if bos is not None and data.get("add_bos_token", by_default):
        frame.insert(0, tokens[bos])
        named.append((tokens[bos], bos))
    if eos is not None and data.get("add_eos_token", False):
        frame.append(tokens[eos])
        named.append((tokens[eos], eos))
    if named:
        tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=list(dict(named).items()))


def _eos_ids(data: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[int, ...]:
    named = [_special_id(data, f"{name}_token_id", tokens) for name in ("eos", "eot", "eom")]
    listed = [i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_OF_TURN]
    return tuple(dict.fromkeys([i for i in named if i is not None] + listed))


def _special_id(data: Mapping[str, Any], key: str, tokens: list[str]) -> int | None:
    value = data.get(key)
    if value is None:
        return None
    if not 0 <= int(value) < len(tokens):
        raise ConfigError(f"the GGUF file's {key} is outside the vocabulary")
    return int(value)
