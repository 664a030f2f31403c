"""gpt-oss (OpenAI 2025): ``model_type`` gpt_oss.

Every other layer sees a window; each head's softmax has one more score that belongs to no token (a sink); all layers
have a mixture of experts with biases and a clamped activation. Folders hold the experts of a layer stacked, as MXFP4 or
dequantised; in GGUF files they can be read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward
from bough.device.layers.moe import Experts, Router, Routing, SparseMoE, adaptable
from bough.device.ops.experts import Clamp
from bough.device.quant.base import Held, LinearMethod, Parameter
from bough.device.quant.mxfp4 import GROUP, MxFp4
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows

NAMES = "gate_proj", "up_proj", "down_proj"
GATES, VALUES, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)


class GptOss(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "num_local_experts": 128,
        "sliding_window": 128, "max_position_embeddings": 131072, "rope_theta": 150_000.0, "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        read = super().read(c)
        return replace(
            read,
            norm=replace(read.norm, eps=c.number("rms_norm_eps", 1e-5), wide=True),
            windows=layer_windows(c, lambda i: i % 2 == 0),
            sinks=True,
        )

    def mlp(self, prefix: str, i: int) -> FeedForward:
        context, reader, (hidden, inner) = self.context, self.config, (self.c.hidden_size, self.c.intermediate_size)
        n_experts = reader.size("num_local_experts")
        routing = Routing(n_experts=n_experts, top_k=reader.size("num_experts_per_tok", 4), scores="chosen")
        router = Router(context, f"{prefix}.router", hidden, routing, bias=True)
        at = f"{prefix}.experts"
        clamp = Clamp(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0))
        single = context.has(f"{at}.0.down_proj.weight")
        experts = [self._expert(f"{at}.{e}") for e in range(n_experts)] if single else self._experts(at, n_experts)
        adapted = adaptable(context, at, experts, NAMES, hidden, inner, alternating=True)
        return SparseMoE(router, Experts(context, adapted, hidden, inner, clamp))

    def _expert(self, at: str) -> tuple[LinearMethod, LinearMethod]:
        """The one whose parameters' names begin with ``at``."""
        context, hidden, inner = self.context, self.c.hidden_size, self.c.intermediate_size

        def linear(names: tuple[str, ...], n_in: int, n_out: int) -> LinearMethod:
            bias = torch.cat([context.parameter(f"{at}.{name}.bias", (n_out,)) for name in names])
            return context.linear([(f"{at}.{name}.weight", n_out) for name in names], n_in, bias)

        return linear(("gate_proj", "up_proj"), hidden, inner), linear(("down_proj",), inner, hidden)

    def _experts(self, at: str, n_experts: int) -> list[tuple[LinearMethod, LinearMethod]]:
        """Those that are stacked in parameters whose names begin with ``at``."""
        context, hidden, inner = self.context, self.c.hidden_size, self.c.intermediate_size
        gate_up = self._stacked(f"{at}.gate_up_proj", (n_experts, hidden, 2 * inner))
        gate_up_bias = context.parameter(f"{at}.gate_up_proj_bias", (n_experts, 2 * inner))
        down = self._stacked(f"{at}.down_proj", (n_experts, inner, hidden))
        down_bias = context.parameter(f"{at}.down_proj_bias", (n_experts, hidden))
        # Outputs of the first product alternate: a gate, a value.
        return [
            (
                context.linear_of([gate_up(e, GATES), gate_up(e, VALUES)], torch.cat((bias[GATES], bias[VALUES]))),
                context.linear_of([down(e, ALL)], down_bias[e]),
            )
            for e, bias in enumerate(gate_up_bias)
        ]

    def _stacked(self, name: str, shape: tuple[int, int, int]) -> Callable[[int, slice], Parameter]:
        """(expert, outputs) -> the weight [out, in] of these outputs, of ``name`` with ``shape`` [E, in, out]."""
        context, (n_experts, n_in, n_out) = self.context, shape
        if not context.has(f"{name}_blocks"):
            whole = context.parameter(name, shape)
            return lambda e, outputs: Held(whole[e, :, outputs].T.contiguous())
        groups = n_experts, n_out, -(-n_in // GROUP)
        codes = context.parameter(f"{name}_blocks", (*groups, GROUP // 2))
        exponents = context.parameter(f"{name}_scales", groups)
        if {codes.dtype, exponents.dtype} != {torch.uint8} or n_in % GROUP:
            raise ConfigError(f"{name} is not MXFP4 with groups of {GROUP} inputs")
        context.n_parameters += n_experts * n_in * n_out - codes.numel() - exponents.numel()
        return lambda e, outputs: MxFp4(codes[e, outputs], exponents[e, outputs], context.dtype)
