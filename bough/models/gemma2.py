"""Gemma 2 (Gemma Team 2024): ``model_type`` gemma2.

Norms before and after attention and feed-forward layer, with factors 1 + weight; gelu; scores and logits bounded by a
soft cap; every other layer sees a window; embeddings scaled by the root of their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bough.device.layers.mlp import activation_of
from bough.device.layers.norm import NormForm
from bough.models.config import ConfigReader
from bough.models.decoder import Decoder, DecoderConfig, layer_windows, read_sizes


def gemma_sizes(c: ConfigReader) -> dict[str, Any]:
    """The fields of :class:`DecoderConfig` that Gemma's releases read alike."""
    if c.flag("use_bidirectional_attention"):
        raise c.unsupported("use_bidirectional_attention")
    bias = c.flag("attention_bias")
    sizes = read_sizes(c)
    return {
        **sizes,
        "norm": NormForm(sizes["norm"].eps, offset=1.0),
        "activation": activation_of(c.get("hidden_activation", "gelu_pytorch_tanh")),
        "qkv_bias": bias,
        "out_bias": bias,
        "attention_scale": c.number("query_pre_attn_scalar", 256) ** -0.5,
        "embedding_scale": sizes["hidden_size"] ** 0.5,
    }


class Gemma2(Decoder):
    """A :class:`bough.models.base.Model`."""

    defaults: Mapping[str, Any] = {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }  # fmt: skip
    norms = "input", "post_attention", "pre_feedforward", "post_feedforward"

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        return DecoderConfig(
            **{**gemma_sizes(c), "windows": layer_windows(c, lambda i: i % 2 == 0)},
            attention_softcap=c.number("attn_logit_softcapping", 0),
            logit_softcap=c.number("final_logit_softcapping", 0),
        )
