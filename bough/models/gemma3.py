"""The text part of Gemma 3 (Gemma Team 2025): ``model_type`` gemma3, and gemma3_text for checkpoints without images.

Gemma 2 without soft caps, with norms of each query and key, and a rotary base of their own for layers that see a
window, which are five of six.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bough.device.layers.rotary import DEFAULT_THETA, rope_parameters
from bough.models.config import ConfigReader
from bough.models.decoder import FULL, SLIDING, DecoderConfig, layer_windows
from bough.models.gemma2 import Gemma2, gemma_sizes


class Gemma3(Gemma2):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        **Gemma2.defaults, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1_000_000.0,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        pattern = c.size("sliding_window_pattern", 6)
        return DecoderConfig(
            **{**gemma_sizes(c), "windows": layer_windows(c, lambda i: (i + 1) % pattern != 0)},
            logit_softcap=c.number("final_logit_softcapping", 0),
            qk_norm="head",
        )

    def rotary(self, i: int) -> torch.Tensor:
        return self.table(SLIDING if self.c.windows[i] else FULL)

    def rope_settings(self, kind: str) -> dict[str, Any]:
        # Before transformers 5, configs told the base of these layers beside the settings of the others.
        if kind == SLIDING and FULL not in self.config.get("rope_parameters", {}):
            return rope_parameters({"rope_theta": self.config.number("rope_local_base_freq", DEFAULT_THETA)})
        return super().rope_settings(kind)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or "vision_tower." in name or "multi_modal_projector." in name
