"""Qwen3 (Yang et al. 2025): ``model_type`` qwen3. Llama with norms of each query and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, read_sizes
from bough.models.qwen2 import Qwen2, qwen_windows


class Qwen3(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {**Qwen2.defaults, "head_dim": 128}

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        bias = c.flag("attention_bias")
        sizes = {**read_sizes(c), "windows": qwen_windows(c)}
        return DecoderConfig(**sizes, qkv_bias=bias, out_bias=bias, qk_norm="head")
