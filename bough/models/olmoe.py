"""OLMoE (Muennighoff et al. 2024): ``model_type`` olmoe.

Llama with a mixture of experts in every layer, norms of all queries and of all keys at once, and, where the config says
so, bounds of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward
from bough.device.layers.moe import Router, Routing, SparseMoE, read_experts
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig

NAMES = "gate_proj", "up_proj", "down_proj"


class Olmoe(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 4096,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        read = super().read(c)
        if read.activation != "silu":
            raise ConfigError("experts with another activation than silu are not supported")
        return replace(read, qk_norm="all", qkv_clip=c.number("clip_qkv", 0.0))

    def mlp(self, prefix: str, i: int) -> FeedForward:
        c, reader = self.c, self.config
        routing = Routing(
            n_experts=reader.size("num_experts"),
            top_k=reader.size("num_experts_per_tok"),
            normalise=reader.flag("norm_topk_prob"),
        )
        router = Router(self.context, f"{prefix}.gate", c.hidden_size, routing)
        sizes = c.hidden_size, c.intermediate_size
        return SparseMoE(router, read_experts(self.context, f"{prefix}.experts", routing.n_experts, NAMES, *sizes))
