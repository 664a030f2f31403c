"""SmolLM3 (Hugging Face 2025): ``model_type`` smollm3. Llama in which every fourth layer does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows


class SmolLM3(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        read = super().read(c)
        if not c.flag("use_sliding_window"):
            return read
        rotates = rotating_layers(c)
        return replace(read, windows=layer_windows(c, lambda i: not rotates[i]))

    def rotary(self, i: int) -> torch.Tensor:
        return self.table() if rotating_layers(self.config)[i] else self.no_table()


def rotating_layers(c: ConfigReader) -> list[bool]:
    """Which layers rotate: ``no_rope_layers`` says 1 for those that do."""
    n_layers, interval = c.size("num_hidden_layers"), c.size("no_rope_layer_interval", 4)
    listed = c.layers("no_rope_layers", n_layers)
    return [(i + 1) % interval != 0 for i in range(n_layers)] if listed is None else [bool(x) for x in listed]
