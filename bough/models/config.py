"""Typed access to a Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.base.errors import ConfigError


class ConfigReader:
    """Numbers and flags of a config; ConfigError names the key whose value is of no use. A null counts as missing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.raw = config

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it is."""
        value = self.raw.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._unusable(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._unusable(key, value)
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or False."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._unusable(key, value)
        return value

    def layers(self, key: str, n_layers: int) -> list[Any] | None:
        """One value for each layer; None where there are none."""
        values = self.get(key)
        if values is not None and (not isinstance(values, list) or len(values) < n_layers):
            raise self._unusable(key, values)
        return None if values is None else list(values[:n_layers])

    def unsupported(self, key: str) -> ConfigError:
        """The error for a value that means something which is not computed."""
        return ConfigError(f"models whose config has {key!r}: {self.raw.get(key)!r} are not supported")

    def _unusable(self, key: str, value: Any) -> ConfigError:
        return ConfigError(f"the model's config has no usable {key!r}: {value!r}")
