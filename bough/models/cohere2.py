"""Command R7B and Command A (Cohere 2025): ``model_type`` cohere2.

Attention and feed-forward layer side by side behind one layer norm; three of four layers see a window and rotate, in
neighbouring pairs, the fourth sees everything and does not rotate; logits are scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bough.device.layers.block import ParallelBlock
from bough.device.layers.norm import NormForm
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows


class Cohere2(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {"sliding_window": 4096, "tie_word_embeddings": True, "max_position_embeddings": 8192}

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        pattern = c.size("sliding_window_pattern", 4)
        return replace(
            super().read(c),
            norm=NormForm(c.number("layer_norm_eps", 1e-5)),
            layer_norm=True,
            windows=layer_windows(c, lambda i: (i + 1) % pattern != 0),
            interleaved=True,
            logit_scale=c.number("logit_scale", 0.0625),
        )

    def block(self, prefix: str, i: int) -> ParallelBlock:
        norm = self.norm(f"{prefix}.input_layernorm")
        return ParallelBlock(norm, self.attention(f"{prefix}.self_attn", i), self.mlp(f"{prefix}.mlp", i))

    def rotary(self, i: int) -> torch.Tensor:
        return self.table() if self.c.windows[i] else self.no_table()
