"""OLMo 2 (OLMo Team 2025): ``model_type`` olmo2.

Norms behind attention and feed-forward layer instead of before them, and of all queries and all keys at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.device.layers.norm import NormForm
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Olmo2(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}

    norms = None, "post_attention", None, "post_feedforward"

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        norm = NormForm(c.number("rms_norm_eps", 1e-5), wide=True)
        return replace(super().read(c), norm=norm, qk_norm="all")
