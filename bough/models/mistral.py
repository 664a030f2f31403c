"""Mistral (Jiang et al. 2023): ``model_type`` mistral. Llama, at first with a sliding window in every layer."""

from __future__ import annotations

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows, read_sizes


class Mistral(Decoder):
    """A :class:`bough.models.base.Model`."""

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return DecoderConfig(**{**read_sizes(c), "windows": layer_windows(c, lambda i: True)})
