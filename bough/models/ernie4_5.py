"""ERNIE 4.5 (Baidu 2025), without experts: ``model_type`` ernie4_5. Llama that rotates neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Ernie45(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "tie_word_embeddings": True, "max_position_embeddings": 131072,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        bias = c.flag("use_bias")
        return replace(super().read(c), qkv_bias=bias, out_bias=bias, mlp_bias=bias, interleaved=True)
