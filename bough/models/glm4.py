"""GLM-4-0414 (Team GLM 2024): ``model_type`` glm4.

Norms before and after attention and feed-forward layer; half of each head rotates, in neighbouring pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.device.layers.block import Block, Norms
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Glm4(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {"partial_rotary_factor": 0.5, "attention_bias": True}

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return replace(super().read(c), out_bias=False, interleaved=True)

    def block(self, prefix: str, i: int) -> Block:
        norms = ["input", "post_self_attn", "post_attention", "post_mlp"]
        before, after, before_mlp, after_mlp = (self.norm(f"{prefix}.{name}_layernorm") for name in norms)
        return Block(
            self.attention(f"{prefix}.self_attn", i),
            Norms(before, after),
            self.mlp(f"{prefix}.mlp", i),
            Norms(before_mlp, after_mlp),
        )
