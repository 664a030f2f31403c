"""Qwen3-MoE (Yang et al. 2025): ``model_type`` qwen3_moe. Qwen3 where layers have a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from bough.models.config import ConfigReader
from bough.models.decoder import DecoderConfig
from bough.models.qwen2_moe import QwenMoE
from bough.models.qwen3 import Qwen3


class Qwen3Moe(QwenMoE, Qwen3):
    """A :class:`bough.models.base.Model`. With windows all layers have them, whatever else the config says."""

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        made = super().read(c)
        window = c.size("sliding_window", 4096) if c.flag("use_sliding_window") else 0
        return replace(made, windows=(window,) * made.n_layers)
