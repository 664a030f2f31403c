"""Llama (Touvron et al. 2023) and everything of its shape: ``model_type`` llama.

Pre-norm transformer with rotary positions, grouped-query attention and a gated SiLU feed-forward layer; biases on
projections, tied or separate head. One layer is nine ops:

    x = add_norm(x, residual); qkv; rotate and write KV; attend; out
    x = add_norm(x, residual); gate_up; silu_mul; down

Shapes: T new tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.layers.attention import Attention
from bough.device.layers.context import LayerContext
from bough.device.layers.embedding import Embedding
from bough.device.layers.logits import LMHead, ScoreHead
from bough.device.layers.mlp import GatedMLP
from bough.device.layers.norm import RMSNorm
from bough.device.layers.rotary import rope_parameters, rotary_table
from bough.device.ops.cells import Cells
from bough.device.ops.stack import StackedLayer, StackShape
from bough.models.base import KVShape, labels_of

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaConfig:
    """The numbers of a Hugging Face config that this file uses."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """ConfigError for what is missing, or for what this file does not compute."""

        def size(key: str, default: int | None = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"the model's config has no usable {key!r}: {value!r}")
            return value

        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act {config['hidden_act']!r} is not supported")
        hidden_size, n_heads = size("hidden_size"), size("num_attention_heads")
        read = cls(
            vocab_size=size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size("intermediate_size"),
            n_layers=size("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=size("num_key_value_heads", n_heads),
            head_dim=size("head_dim", hidden_size // n_heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
        if read.n_heads % read.n_kv_heads or read.head_dim % 2:
            raise ConfigError(f"{n_heads} heads of {read.head_dim} over {read.n_kv_heads} key-value heads do not work")
        return read


class _Layer:
    """Attention and feed-forward layer around one residual stream."""

    def __init__(self, context: LayerContext, prefix: str, c: LlamaConfig, rotary: Tensor) -> None:
        heads = c.n_heads, c.n_kv_heads, c.head_dim
        self._attention_norm = RMSNorm(context, f"{prefix}.input_layernorm", c.hidden_size, c.norm_eps)
        self._attention = Attention(context, f"{prefix}.self_attn", c.hidden_size, heads, rotary, c.attention_bias)
        self._mlp_norm = RMSNorm(context, f"{prefix}.post_attention_layernorm", c.hidden_size, c.norm_eps)
        self._mlp = GatedMLP(context, f"{prefix}.mlp", c.hidden_size, c.intermediate_size, c.mlp_bias)

    def __call__(self, x: Tensor | None, residual: Tensor, k: Cells, v: Cells) -> Tensor:
        """What is still to be added to ``residual`` [T, D], given ``x``, what the layer before left to be added."""
        norm = self._attention_norm
        x = norm(residual) if x is None else norm.add(x, residual)
        x = self._attention(x, k, v)
        return self._mlp(self._mlp_norm.add(x, residual))

    def stacked(self) -> StackedLayer:
        """The layer as the op that computes all of them takes it."""
        attention, mlp = self._attention, self._mlp
        linears = attention.qkv.parts, attention.out.parts, mlp.gate_up.parts, mlp.down.parts
        return StackedLayer(self._attention_norm.weight, self._mlp_norm.weight, *linears)


class Llama:
    """A :class:`bough.models.base.Model`."""

    causal = True

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        c = LlamaConfig.read(config)
        rotary = rotary_table(rope_parameters(config), c.head_dim, n_positions).to(context.device)
        self.labels = labels_of(config)
        tied = c.tied and not self.labels
        self._embedding = Embedding(context, "model.embed_tokens", c.vocab_size, c.hidden_size, tied)
        self._layers = [_Layer(context, f"model.layers.{i}", c, rotary) for i in range(c.n_layers)]
        self._norm = RMSNorm(context, "model.norm", c.hidden_size, c.norm_eps)
        self.vocab_size = min(n_ids, c.vocab_size)
        self._head: LMHead | ScoreHead
        if self.labels:
            self._head = ScoreHead(context, "score", len(self.labels), c.hidden_size)
        else:
            sizes = c.vocab_size, self.vocab_size, c.hidden_size
            self._head = LMHead(context, "lm_head", sizes, self._embedding if tied else None)
        context.check_all_read(
            lambda name: name.endswith("rotary_emb.inv_freq") or (c.tied and name == "lm_head.weight")
        )
        self._attention = context.attention
        shape = StackShape(
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            eps=c.norm_eps,
            scale=c.head_dim**-0.5,
        )
        self._stack = context.ops.layer_stack(
            [layer.stacked() for layer in self._layers], self._norm.weight, rotary, shape
        )
        self.kv_shape = KVShape(c.n_layers, c.n_kv_heads, c.head_dim, context.dtype)

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        residual = self._embedding(tokens)
        if self._stack is not None:
            return self._stack(residual, self._attention.batch, k, v)
        x: Tensor | None = None
        for layer, k_cache, v_cache in zip(self._layers, k, v):
            x = layer(x, residual, k_cache, v_cache)
        return self._norm(residual) if x is None else self._norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
