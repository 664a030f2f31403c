"""Mistral (Jiang et al. 2023): ``model_type`` mistral. Llama, at first with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows, read_sizes


class Mistral(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return DecoderConfig(**{**read_sizes(c), "windows": layer_windows(c, lambda i: True)})
