"""Phi-3 and Phi-4 (Abdin et al. 2024): ``model_type`` phi3.

Llama with one parameter for queries, keys and values, one for gate and up, and LongRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows, read_sizes


class Phi3(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return DecoderConfig(**{**read_sizes(c), "windows": layer_windows(c, lambda i: True)})

    def rope_settings(self, kind: str) -> dict[str, Any]:
        settings = super().rope_settings(kind)
        if settings["rope_type"] == "yarn":  # what the first release called LongRoPE
            settings["rope_type"] = "longrope"
        return settings
