"""DeepSeek-V2 (DeepSeek-AI 2024): ``model_type`` deepseek_v2.

Latent attention (:mod:`bough.device.layers.latent`); after a few dense layers, mixtures of experts that come in groups,
of which a token uses a few, beside experts that every token uses.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward, Mixer
from bough.device.layers.latent import LatentAttention, LatentForm
from bough.device.layers.mlp import GatedMLP
from bough.device.layers.moe import Router, Routing, SparseMoE, read_experts
from bough.models.base import CacheSpec
from bough.models.config import ConfigReader
from bough.models.decoder import FULL, Decoder, DecoderConfig

NAMES = "gate_proj", "up_proj", "down_proj"


class DeepseekV2(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_shared_experts": 2,
        "q_lora_rank": 1536, "n_routed_experts": 64, "moe_intermediate_size": 1407, "max_position_embeddings": 2048,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        read = super().read(c)
        if read.activation != "silu":
            raise ConfigError("experts with another activation than silu are not supported")
        if c.size("moe_layer_freq", 1) != 1:
            raise c.unsupported("moe_layer_freq")
        return replace(read, head_dim=c.size("qk_rope_head_dim"), interleaved=c.flag("rope_interleave", True))

    def attention(self, prefix: str, i: int) -> Mixer:
        c, reader = self.c, self.config
        nope = reader.size("qk_nope_head_dim")
        form = LatentForm(
            hidden_size=c.hidden_size,
            n_heads=c.n_heads,
            latent_size=reader.size("kv_lora_rank"),
            rotary_size=c.head_dim,
            nope_size=nope,
            value_size=reader.size("v_head_dim"),
            query_latent_size=0 if reader.get("q_lora_rank") is None else reader.size("q_lora_rank"),
            bias=c.qkv_bias,
            interleaved=c.interleaved,
            scale=(nope + c.head_dim) ** -0.5 * self._yarn_scale(),
        )
        return LatentAttention(self.context, prefix, form, self.rotary(i))

    def _yarn_scale(self) -> float:
        """The factor of the scores with which the models were extended by YaRN."""
        settings = self.rope_settings(FULL)
        weight = settings.get("mscale_all_dim")
        if settings["rope_type"] == "default" or not weight:
            return 1.0
        reader = ConfigReader(settings)
        factor = max(1.0, reader.number("factor"))
        return (0.1 * reader.number("mscale_all_dim") * math.log(factor) + 1.0) ** 2

    def mlp(self, prefix: str, i: int) -> FeedForward:
        c, reader = self.c, self.config
        dense = reader.get("first_k_dense_replace", 0)
        if not isinstance(dense, int):
            raise ConfigError(f"the model's config has no usable 'first_k_dense_replace': {dense!r}")
        if i < dense:
            return super().mlp(prefix, i)
        size, n_experts = reader.size("moe_intermediate_size"), reader.size("n_routed_experts")
        experts = read_experts(self.context, f"{prefix}.experts", n_experts, NAMES, c.hidden_size, size)
        n_shared = reader.size("n_shared_experts")
        shared = GatedMLP(self.context, f"{prefix}.shared_experts", c.hidden_size, n_shared * size, c.mlp_bias)
        return SparseMoE(self.router(f"{prefix}.gate", n_experts), experts, shared)

    def router(self, name: str, n_experts: int) -> Router:
        """What chooses the experts of a layer."""
        reader = self.config
        method = reader.get("topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise reader.unsupported("topk_method")
        if reader.flag("norm_topk_prob"):
            raise reader.unsupported("norm_topk_prob")
        grouped = method == "group_limited_greedy"
        routing = Routing(
            n_experts=n_experts,
            top_k=reader.size("num_experts_per_tok"),
            scale=reader.number("routed_scaling_factor", 1.0),
            n_groups=reader.size("n_group") if grouped else 1,
            top_groups=reader.size("topk_group") if grouped else 1,
        )
        return Router(self.context, name, self.c.hidden_size, routing)

    def caches(self) -> tuple[CacheSpec, ...]:
        """The rotated key and the latent of each token."""
        return (CacheSpec(1, self.c.head_dim + self.config.size("kv_lora_rank"), 0),) * self.c.n_layers

    def ignores(self, name: str) -> bool:
        # Layers behind the last one predict several tokens ahead.
        found = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        return super().ignores(name) or (found is not None and int(found[1]) >= self.c.n_layers)
