"""BERT (Devlin et al. 2019) as an encoder of texts, and as a classifier of texts or pairs: ``model_type`` bert.

Word, position and type embeddings, then post-norm transformer layers with attention in both directions. Checkpoints
name their parameters with or without the prefix ``bert.``; the heads of pre-training are left out, and the pooler, too,
where no classifier reads it.

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

_PARTS = ("weight", 2), ("bias", 1)
"""Parameters of a linear layer, and how many dimensions they have."""


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


class _Classifier:
    """Hidden state of the first token -> pooler -> scores of the labels, in float32 however other weights are held."""

    def __init__(self, context: LayerContext, pooler: str, n_labels: int, d: int) -> None:
        self._pooler = [context.parameter(f"{pooler}.{part}", (d, d)[:n]).float() for part, n in _PARTS]
        self._head = [context.parameter(f"classifier.{part}", (n_labels, d)[:n]).float() for part, n in _PARTS]

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, n_labels] float32."""
        linear = torch.nn.functional.linear
        return linear(torch.tanh(linear(hidden.float(), *self._pooler)), *self._head)


class Bert:
    """A :class:`bough.models.base.Model` that gives hidden states, or scores of labels, and no logits."""

    causal = False
    defaults: Mapping[str, Any] = {"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "type_vocab_size": 2}

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "max_position_embeddings", "type_vocab_size")  # fmt: skip
        config = {**self.defaults, **config}
        wrong = [name for name in sizes if not isinstance(config.get(name), int) or config[name] < 1]
        if wrong or config["hidden_size"] % config["num_attention_heads"]:
            raise ConfigError(f"the model's config has no usable {wrong[0] if wrong else 'num_attention_heads'!r}")
        if config.get("hidden_act", "gelu") != "gelu":
            raise ConfigError("of BERT models, those with the activation gelu are supported")
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
        self.labels = labels_of(config)
        self._has_pairs = bool(self.labels) and config["type_vocab_size"] > 1
        if self.labels:
            self._classifier = _Classifier(context, f"{prefix}pooler.dense", len(self.labels), d)
        context.check_all_read(
            lambda name: name.startswith((f"{prefix}pooler.", "cls.")) or name.endswith(".position_ids")
        )
        self.vocab_size = min(n_ids, config["vocab_size"])
        self.kv_shape = KVShape((), context.dtype)

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        places = self._places(self._attention.batch.positions)
        x = self._norm(self._words(tokens) + places + self._types(self._types_of(tokens)))
        for layer in self._layers:
            x = layer(x)
        return x

    def decode(self, tokens: Tensor, last: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> None:
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        raise TypeError("an encoder gives no logits")

    def scores(self, hidden: Tensor) -> Tensor:
        return self._classifier(hidden)

    def _types_of(self, tokens: Tensor) -> Tensor:
        """[T] 0 or 1: the second text of a pair begins behind the first separator, which is what a sequence ends with.

        Nothing but a classifier is given pairs, and where there is one type, they differ by the separator alone.
        """
        if not self._has_pairs:
            return torch.zeros_like(tokens)
        starts = self._attention.batch.q_start
        lengths = starts.diff()
        ends = tokens == tokens[starts[1:] - 1].repeat_interleave(lengths)
        before = ends.cumsum(0) - ends.long()
        return (before > before[starts[:-1]].repeat_interleave(lengths)).int()
