"""Qwen3-MoE (Yang et al. 2025): ``model_type`` qwen3_moe. Qwen3 where layers have a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import DecoderConfig
from bough.models.qwen2_moe import QwenMoE
from bough.models.qwen3 import Qwen3


class Qwen3Moe(QwenMoE, Qwen3):
    """A :class:`bough.models.base.Model`. With windows all layers have them, whatever else the config says."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 4, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "sliding_window": 4096, "max_position_embeddings": 32768,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        made = super().read(c)
        window = c.size("sliding_window") if c.flag("use_sliding_window") else 0
        return replace(made, windows=(window,) * made.n_layers)
