"""The text part of Llama 4 (Meta 2025): ``model_type`` llama4, and llama4_text for checkpoints without images.

Three of four layers rotate, in neighbouring pairs, normalise each query and key, and see a chunk: the positions from
the last multiple of its size on. The fourth sees everything, does not rotate, and multiplies late queries. Some or all
layers have experts whose inputs are weighted, beside one that every token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.layers.attention import AttentionForm
from bough.device.layers.block import FeedForward
from bough.device.layers.mlp import GatedMLP
from bough.device.layers.moe import Experts, Router, Routing, WeightedInputs, adaptable, read_experts
from bough.device.layers.rotary import rotary_table
from bough.device.quant.base import Held, LinearMethod
from bough.models.config import ConfigReader
from bough.models.decoder import FULL, Decoder, DecoderConfig, layer_chunks
from bough.models.smollm3 import rotating_layers

NAMES = "gate_proj", "up_proj", "down_proj"


class Llama4(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "attention_chunk_size": 8192,
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        rotates = rotating_layers(c)
        read = super().read(c)
        if read.activation != "silu":
            raise ConfigError("experts with another activation than silu are not supported")
        return replace(read, windows=layer_chunks(c, lambda i: rotates[i]), chunked=True, interleaved=True)

    def form(self, i: int) -> AttentionForm:
        reader, rotates = self.config, rotating_layers(self.config)[i]
        # Early configs have a number in place of the flag.
        tuned = bool(reader.get("attn_temperature_tuning", True)) and not rotates
        form = super().form(i)
        if rotates and self._normalises():
            form = replace(form, qk_norm="bare", norm=replace(form.norm, eps=form.norm.eps / self._factor() ** 2))
        return replace(
            form,
            warming=(reader.size("floor_scale", 8192), reader.number("attn_scale", 0.1)) if tuned else None,
        )

    def rotary(self, i: int) -> torch.Tensor:
        return self.table() if rotating_layers(self.config)[i] else self.no_table()

    def rope_settings(self, kind: str) -> dict[str, Any]:
        settings = super().rope_settings(kind)
        return {**settings, "attention_factor": 1.0} if self._normalises() else settings

    def _normalises(self) -> bool:
        """Whether queries and keys are normalised once they are rotated, and so multiplied by the table's factor f.

        Normalised before, they are the same without the factor and with ``eps / f ** 2``.
        """
        return self.config.flag("use_qk_norm", True)

    def _factor(self) -> float:
        """The one of the rotary table, had it one."""
        factor = float(rotary_table(super().rope_settings(FULL), self.c.head_dim, 1)[0, 0])
        if not factor:
            raise ConfigError("queries and keys that are multiplied by 0 cannot be normalised")
        return factor

    def mlp(self, prefix: str, i: int) -> FeedForward:
        context, reader, c = self.context, self.config, self.c
        at, step = f"{prefix.removesuffix('mlp')}feed_forward", reader.size("interleave_moe_layer_step", 1)
        sparse = reader.get("moe_layers", range(step - 1, c.n_layers, step))
        if not isinstance(sparse, list | range):
            raise ConfigError(f"the model's config has no usable 'moe_layers': {sparse!r}")
        if i not in sparse:
            return GatedMLP(context, at, c.hidden_size, reader.size("intermediate_size_mlp"))
        sizes = c.hidden_size, c.intermediate_size
        routing = Routing(
            n_experts=reader.size("num_local_experts", 16), top_k=reader.size("num_experts_per_tok", 1), scores="each"
        )
        router = Router(context, f"{at}.router", c.hidden_size, routing)
        shared = GatedMLP(context, f"{at}.shared_expert", *sizes)
        return WeightedInputs(router, self._experts(f"{at}.experts", routing.n_experts), shared)

    def _experts(self, at: str, n_experts: int) -> Experts:
        """Those whose parameters' names begin with ``at``, stacked or one by one."""
        context, hidden, inner = self.context, self.c.hidden_size, self.c.intermediate_size
        if context.has(f"{at}.0.down_proj.weight"):
            return read_experts(context, at, n_experts, NAMES, hidden, inner, swapped=True)
        gate_up = context.parameter(f"{at}.gate_up_proj", (n_experts, hidden, 2 * inner))
        down = context.parameter(f"{at}.down_proj", (n_experts, inner, hidden))

        def linear(weight: torch.Tensor) -> LinearMethod:
            return context.linear_of([Held(weight.T.contiguous())], None)

        experts = [(linear(a), linear(b)) for a, b in zip(gate_up, down)]
        return Experts(context, adaptable(context, at, experts, NAMES, hidden, inner, swapped=True), hidden, inner)

    def ignores(self, name: str) -> bool:
        return super().ignores(name) or "vision_model." in name or "multi_modal_projector." in name
