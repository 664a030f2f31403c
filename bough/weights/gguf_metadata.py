"""Typed access to the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from bough.base.errors import ConfigError
from bough.weights.gguf import Value

_MAX_SIZE = 1 << 31


class Metadata:
    """Typed access to metadata; keys with ``{}`` stand for the architecture's own."""

    def __init__(self, values: Mapping[str, Value], arch: str) -> None:
        self.values = values
        self.arch = arch

    def get(self, key: str) -> Value | None:
        return self.values.get(key.format(self.arch))

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer, or ``default``; a per-layer array counts if all its elements agree."""
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if default is not None and (value is None or (type(value) in (int, float) and value == default)):
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_SIZE:
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not one positive integer: {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if default is not None and (value is None or (type(value) in (int, float) and value == default)):
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not a positive number: {value!r}")
        return float(value)

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"GGUF metadata: {key.format(self.arch)} is not a string")
        return value

    def token(self, name: str, n_tokens: int) -> int | None:
        """A special token's id, None if absent."""
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < n_tokens:
            raise ConfigError(f"GGUF metadata: {key} is not the id of a token: {value!r}")
        return value
