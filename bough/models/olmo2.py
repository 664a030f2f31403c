"""OLMo 2 (OLMo Team 2025): ``model_type`` olmo2.

Norms behind attention and feed-forward layer instead of before them, and of all queries and all keys at once.
"""

from __future__ import annotations

from dataclasses import replace

from bough.device.layers.block import Block, Norms
from bough.device.layers.norm import NormForm
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Olmo2(Decoder):
    """A :class:`bough.models.base.Model`."""

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        norm = NormForm(c.number("rms_norm_eps", 1e-5), wide=True)
        return replace(super().read(c), norm=norm, qk_norm="all")

    def block(self, prefix: str, i: int) -> Block:
        return Block(
            self.attention(f"{prefix}.self_attn", i),
            Norms(after=self.norm(f"{prefix}.post_attention_layernorm")),
            self.mlp(f"{prefix}.mlp", i),
            Norms(after=self.norm(f"{prefix}.post_feedforward_layernorm")),
        )
