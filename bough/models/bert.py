"""BERT (Devlin et al. 2019) as an encoder of texts: ``model_type`` bert.

Word, position and type embeddings, then post-norm transformer layers with attention in both directions. Checkpoints
name their parameters with or without the prefix ``bert.``; the pooler and the heads of pre-training are left out.

Shapes: T tokens of whole sequences, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.attention.encoder import EncoderAttention
from bough.device.layers.context import LayerContext
from bough.device.layers.embedding import Embedding
from bough.device.layers.linear import Linear
from bough.device.layers.norm import LayerNorm
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring
from bough.models.base import KVShape, labels_of

Tensor = torch.Tensor


class _Layer:
    """Attention and feed-forward, each followed by the norm of its sum with its input."""

    def __init__(self, context: LayerContext, prefix: str, config: Mapping[str, Any]) -> None:
        d, inner, eps = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        attention = f"{prefix}.attention"
        parts = [(f"{attention}.self.{name}", d) for name in ("query", "key", "value")]
        self._qkv = Linear(context, parts, d, bias=True)
        self._out = Linear(context, [(f"{attention}.output.dense", d)], d, bias=True)
        self._attention_norm = LayerNorm(context, f"{attention}.output.LayerNorm", d, eps)
        self._up = Linear(context, [(f"{prefix}.intermediate.dense", inner)], d, bias=True)
        self._down = Linear(context, [(f"{prefix}.output.dense", d)], inner, bias=True)
        self._norm = LayerNorm(context, f"{prefix}.output.LayerNorm", d, eps)
        self._backend = context.attention
        n_heads = config["num_attention_heads"]
        self._heads = Heads(n_heads, n_heads, d // n_heads)
        self._scoring = Scoring(self._heads.dim**-0.5)

    def __call__(self, x: Tensor) -> Tensor:
        nothing = x[:0]
        q = self._backend.write(self._qkv(x), nothing, nothing, nothing, self._heads)
        attended = self._backend.forward(q, nothing, nothing, self._scoring).flatten(1)
        x = self._attention_norm(x + self._out(attended))
        return self._norm(x + self._down(torch.nn.functional.gelu(self._up(x))))


class Bert:
    """A :class:`bough.models.base.Model` that gives hidden states and no logits."""

    causal = False

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings", "type_vocab_size")  # fmt: skip
        wrong = [name for name in sizes if not isinstance(config.get(name), int) or config[name] < 1]
        if wrong or config["hidden_size"] % config["num_attention_heads"]:
            raise ConfigError(f"the model's config has no usable {wrong[0] if wrong else 'num_attention_heads'!r}")
        if config.get("hidden_act", "gelu") != "gelu" or labels_of(config):
            raise ConfigError("of BERT models, those that embed texts, with the activation gelu, are supported")
        config = {"layer_norm_eps": 1e-12, **config}
        d = config["hidden_size"]
        self._attention = context.attention = EncoderAttention()
        prefix = "bert." if context.has("bert.embeddings.word_embeddings.weight") else ""
        embeddings = f"{prefix}embeddings"
        self._words = Embedding(context, f"{embeddings}.word_embeddings", config["vocab_size"], d, False)
        n_places = config["max_position_embeddings"]
        self._places = Embedding(context, f"{embeddings}.position_embeddings", n_places, d, False)
        self._types = Embedding(context, f"{embeddings}.token_type_embeddings", config["type_vocab_size"], d, False)
        self._norm = LayerNorm(context, f"{embeddings}.LayerNorm", d, config["layer_norm_eps"])
        layers = range(config["num_hidden_layers"])
        self._layers = [_Layer(context, f"{prefix}encoder.layer.{i}", config) for i in layers]
        context.check_all_read(
            lambda name: name.startswith((f"{prefix}pooler.", "cls.")) or name.endswith(".position_ids")
        )
        self.vocab_size = min(n_ids, config["vocab_size"])
        self.labels: tuple[str, ...] = ()
        self.kv_shape = KVShape((), context.dtype)

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        x = self._norm(
            self._words(tokens) + self._places(self._attention.batch.positions) + self._types(torch.zeros_like(tokens))
        )
        for layer in self._layers:
            x = layer(x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        raise TypeError("an encoder gives no logits")

    def scores(self, hidden: Tensor) -> Tensor:
        raise TypeError("an encoder without a classification head gives no scores")
