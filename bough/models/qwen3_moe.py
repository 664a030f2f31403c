"""Qwen3-MoE (Yang et al. 2025): ``model_type`` qwen3_moe. Qwen3 where layers have a mixture of experts."""

from __future__ import annotations

from bough.models.qwen2_moe import QwenMoE
from bough.models.qwen3 import Qwen3


class Qwen3Moe(QwenMoE, Qwen3):
    """A :class:`bough.models.base.Model`."""
