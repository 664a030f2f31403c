"""Mixtral (Jiang et al. 2024): ``model_type`` mixtral. Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward
from bough.device.layers.moe import Router, Routing, SparseMoE, read_experts
from bough.models.config import ConfigReader
from bough.models.decoder import DecoderConfig
from bough.models.mistral import Mistral


class Mixtral(Mistral):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_position_embeddings": 131072,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        read = super().read(c)
        if read.activation != "silu":
            raise ConfigError("experts with another activation than silu are not supported")
        return read

    def mlp(self, prefix: str, i: int) -> FeedForward:
        c, reader = self.c, self.config
        n_experts = reader.size("num_local_experts", 8)
        routing = Routing(n_experts=n_experts, top_k=reader.size("num_experts_per_tok", 2), normalise=True)
        at = prefix.removesuffix("mlp") + "block_sparse_moe"
        if self.context.adapters is not None:
            # As transformers 5 calls it, and so adapters that are made with it; its checkpoints have the old name.
            self.context.adapters.alias(at, prefix)
        router = Router(self.context, f"{at}.gate", c.hidden_size, routing)
        sizes = c.hidden_size, c.intermediate_size
        return SparseMoE(router, read_experts(self.context, f"{at}.experts", n_experts, ("w1", "w3", "w2"), *sizes))
