"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): ``model_type`` deepseek_v3.

DeepSeek-V2 whose experts are scored by sigmoids and chosen with a correction that keeps their load even.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.device.layers.moe import Router, Routing
from bough.models.deepseek_v2 import DeepseekV2


class DeepseekV3(DeepseekV2):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        **DeepseekV2.defaults, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_key_value_heads": 128, "n_routed_experts": 256, "moe_intermediate_size": 2048,
        "max_position_embeddings": 4096,
    }  # fmt: skip

    def router(self, name: str, n_experts: int) -> Router:
        reader = self.config
        routing = Routing(
            n_experts=n_experts,
            top_k=reader.size("num_experts_per_tok"),
            scores="sigmoid",
            normalise=reader.flag("norm_topk_prob"),
            scale=reader.number("routed_scaling_factor"),
            n_groups=reader.size("n_group"),
            top_groups=reader.size("topk_group"),
            pair_groups=True,
        )
        correction = f"{name}.e_score_correction_bias"
        return Router(self.context, name, self.c.hidden_size, routing, correction=correction)
