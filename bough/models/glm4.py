"""GLM-4-0414 (Team GLM 2024): ``model_type`` glm4.

Norms before and after attention and feed-forward layer; half of each head rotates, in neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Glm4(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5,
        "attention_bias": True, "max_position_embeddings": 131072,
    }  # fmt: skip
    norms = "input", "post_self_attn", "post_attention", "post_mlp"

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return replace(super().read(c), out_bias=False, interleaved=True)
