"""Granite 3 (IBM 2024): ``model_type`` granite. Llama with factors of embeddings, scores, residuals and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig


class Granite(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return replace(
            super().read(c),
            attention_scale=c.number("attention_multiplier", 1.0),
            embedding_scale=c.number("embedding_multiplier", 1.0),
            residual_scale=c.number("residual_multiplier", 1.0),
            logit_scale=1.0 / (c.number("logits_scaling", 1.0) or 1.0),
        )
