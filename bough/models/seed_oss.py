"""Seed-OSS (ByteDance 2025): ``model_type`` seed_oss. Llama with biases where its config says so, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class SeedOss(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return replace(super().read(c), out_bias=c.flag("attention_out_bias"))
