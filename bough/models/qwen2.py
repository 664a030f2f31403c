"""Qwen2 and Qwen2.5 (Yang et al. 2024): ``model_type`` qwen2. Llama with biases of queries, keys and values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows, read_sizes


def qwen_windows(c: ConfigReader, sliding: Callable[[int, int], bool] = operator.ge) -> tuple[int, ...]:
    """Of Qwen's models only those that say so have windows, in layers that ``sliding(i, max_window_layers)`` names."""
    if not c.flag("use_sliding_window"):
        return (0,) * c.size("num_hidden_layers")
    border = c.get("max_window_layers", 28)
    return layer_windows(c, lambda i: sliding(i, border))


class Qwen2(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return DecoderConfig(**{**read_sizes(c), "windows": qwen_windows(c)}, qkv_bias=True)
