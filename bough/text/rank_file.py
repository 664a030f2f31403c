"""Reads tiktoken's files: one line for each token, its bytes in base64 and its rank, which is its id."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from bough.base.errors import ConfigError
from bough.text.decoding import BYTE_OF_CHAR

_CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}

_STYLES = {"cl100k_base": "dbrx", "o200k_base": "gpt-4o", "qwen": "qwen2", "tokenizer": "llama-bpe"}
"""Name of a file without its ending -> how its model cuts words, which is not in the file."""


def is_rank_file(path: Path) -> bool:
    """Whether it begins as one: files called ``tokenizer.model`` may also be sentencepiece's."""
    with path.open("rb") as file:
        first = file.readline(1024)
    parts = first.split()
    return len(parts) == 2 and parts[1].isdigit()


def rank_metadata(path: Path) -> dict[str, Any]:
    """The vocabulary as the ``tokenizer.ggml.*`` entries of a GGUF file; ConfigError if it cannot be read."""
    style = _STYLES.get(path.stem)
    if style is None:
        raise ConfigError(f"{path}: of tiktoken files only those called {', '.join(_STYLES)} say how they cut words")
    try:
        tokens = _tokens(path.read_bytes())
    except (OSError, ValueError, binascii.Error) as error:
        raise ConfigError(f"{path} is not a tiktoken file that can be read: {error}") from error
    entries = {"model": "gpt2", "pre": style, "tokens": tokens, "merges": _merges(tokens), "add_bos_token": False}
    return {f"tokenizer.ggml.{key}": value for key, value in entries.items()}


def _tokens(data: bytes) -> list[str]:
    """The tokens in the alphabet of byte-level vocabularies, by rank."""
    found: dict[int, str] = {}
    for line in data.splitlines():
        if line.strip():
            token, rank = line.split()
            found[int(rank)] = "".join(_CHAR_OF_BYTE[byte] for byte in base64.b64decode(token, validate=True))
    if sorted(found) != list(range(len(found))) or len(set(found.values())) != len(found) or "" in found.values():
        raise ValueError("ranks are not numbers from 0, or a token appears twice")
    return [found[rank] for rank in range(len(found))]


def _merges(tokens: list[str]) -> list[str]:
    """Every way to make a token from two: tiktoken joins the neighbours whose joint token has the lowest rank."""
    known = set(tokens)
    return [
        f"{token[:cut]} {token[cut:]}"
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
