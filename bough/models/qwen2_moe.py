"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): ``model_type`` qwen2_moe.

Qwen2 where most layers have a mixture of experts, and beside it one expert that every token uses, weighted by a gate of
its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward
from bough.device.layers.mlp import GatedMLP
from bough.device.layers.moe import GatedExpert, Router, Routing, SparseMoE, read_experts
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig
from bough.models.qwen2 import Qwen2, qwen_windows

NAMES = "gate_proj", "up_proj", "down_proj"


class QwenMoE(Decoder):
    """What Qwen's mixtures of experts have in common: which layers are one, and how they are routed."""

    def mlp(self, prefix: str, i: int) -> FeedForward:
        c, reader = self.c, self.config
        dense = reader.get("mlp_only_layers", [])
        if not isinstance(dense, list) or c.activation != "silu":
            raise ConfigError("the model's config has no usable 'mlp_only_layers', or experts other than with silu")
        if i in dense or (i + 1) % reader.size("decoder_sparse_step", 1):
            return super().mlp(prefix, i)
        n_experts = reader.size("num_experts", reader.get("num_local_experts"))
        routing = Routing(
            n_experts=n_experts,
            top_k=reader.size("num_experts_per_tok"),
            normalise=reader.flag("norm_topk_prob"),
        )
        router = Router(self.context, f"{prefix}.gate", c.hidden_size, routing)
        sizes = c.hidden_size, reader.size("moe_intermediate_size")
        experts = read_experts(self.context, f"{prefix}.experts", n_experts, NAMES, *sizes)
        return SparseMoE(router, experts, self.shared(prefix))

    def shared(self, prefix: str) -> FeedForward | None:
        """The expert that every token uses; None: there is none."""
        return None


class Qwen2Moe(QwenMoE, Qwen2):
    """A :class:`bough.models.base.Model`. Windows are in every other layer, of the first ones."""

    defaults: Mapping[str, Any] = {
        **Qwen2.defaults, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return replace(super().read(c), windows=qwen_windows(c, lambda i, border: i % 2 == 0 and i < border))

    def shared(self, prefix: str) -> FeedForward | None:
        size = self.config.size("shared_expert_intermediate_size")
        expert = GatedMLP(self.context, f"{prefix}.shared_expert", self.c.hidden_size, size)
        return GatedExpert(self.context, f"{prefix}.shared_expert_gate", self.c.hidden_size, expert)
