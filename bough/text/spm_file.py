"""Reads sentencepiece's ``.model`` files (Kudo and Richardson 2018).

Such a file is a protocol buffer of the type ``ModelProto``. Only the fields that decide over ids are read, from the
wire format itself: pieces with scores and types, the kind of model, how text is normalised.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bough.base.errors import ConfigError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_KINDS = {1: "t5", 2: "llama"}
"""``model_type`` -> what GGUF calls a vocabulary that is cut like that: by likelihood (unigram) or by merges."""


def spm_metadata(path: Path) -> dict[str, Any]:
    """The vocabulary as the ``tokenizer.ggml.*`` entries of a GGUF file; ConfigError if it cannot be read."""
    try:
        return {f"tokenizer.ggml.{key}": value for key, value in _vocabulary(path.read_bytes()).items()}
    except (OSError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a sentencepiece model that can be read: {error}") from error


def _vocabulary(data: bytes) -> dict[str, Any]:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(1, b"")).decode())
            scores.append(_float(piece.get(2, 0)))
            types.append(_integer(piece.get(3, 1)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    kind = _KINDS.get(_integer(trainer.get(3, 1)))
    if kind is None or not tokens:
        raise ValueError("only vocabularies of the types unigram and bpe are supported")
    if trainer.get(24):
        raise ValueError("spaces at the ends of words (treat_whitespace_as_suffix) are not supported")

    def special(number: int, default: int) -> int | None:
        token = _integer(trainer.get(number, default))
        return token if 0 <= token < len(tokens) else None

    return {
        "model": kind,
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "unknown_token_id": special(40, 0),
        "bos_token_id": special(41, 1),
        "eos_token_id": special(42, 2),
        "add_space_prefix": bool(normalizer.get(3, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(4, 1)),
        "precompiled_charsmap": _message(normalizer.get(2, b"")),
    }


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: integers, or bytes; ValueError where it is cut off."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field of type {kind} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"{size} bytes are announced at byte {at}, {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, position behind it)."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(f"a number without an end before byte {at}")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message should be")
    return value


def _integer(value: int | bytes) -> int:
    """A signed integer of 32 bits, as its two's complement in 64."""
    if not isinstance(value, int):
        raise ValueError("a message where a number should be")
    return value - (1 << 64) if value >> 63 else value


def _float(value: int | bytes) -> float:
    found: float = struct.unpack("<f", value)[0] if isinstance(value, bytes) else float(value)
    return found
