"""What the decoders have in common: token embedding, blocks around one residual stream, norm, head.

An architecture is a subclass. It says how its config is read (:meth:`Decoder.read`) and, where it is not Llama's, how a
block is made (:meth:`Decoder.block`, or only :meth:`attention`, :meth:`mlp`, :meth:`rotary` of it).

Shapes: T new tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bough.base.errors import ConfigError
from bough.device.layers.attention import Attention, AttentionForm, QKNorm
from bough.device.layers.block import Block, FeedForward, Mixer, Norms, ParallelBlock
from bough.device.layers.context import LayerContext
from bough.device.layers.embedding import Embedding
from bough.device.layers.logits import LMHead, ScoreHead
from bough.device.layers.mlp import Activation, GatedMLP, activation_of
from bough.device.layers.norm import LayerNorm, Norm, NormForm, RMSNorm
from bough.device.layers.rotary import rope_parameters, rotary_table
from bough.device.ops.cells import Cells
from bough.device.ops.decode import Decoded, DecodeSteps
from bough.device.ops.stack import LayerStack, StackShape
from bough.models.base import CacheSpec, KVShape, labels_of
from bough.models.config import ConfigReader

Tensor = torch.Tensor

PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
"""What may stand before the names of a decoder's parameters: alone, as a part of others, saved without its head."""

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """The numbers of a Hugging Face config, in one spelling.

    Attributes:
        norm: how its norms are computed; ``layer_norm``: they are layer norms without bias.
        qkv_bias, out_bias, mlp_bias: of the projections.
        windows: positions that each layer's tokens see, 0 for all; ``chunked``: those from the last multiple of it on.
        attention_scale: factor of the scores; None: 1 / sqrt(head_dim).
        attention_softcap, logit_softcap: bounds of scores and logits, 0 for none.
        embedding_scale, residual_scale, logit_scale: factors of embeddings, of what sublayers add, of logits.
        qk_norm, qkv_clip, interleaved, sinks: see :class:`bough.device.layers.attention.AttentionForm`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    norm: NormForm
    tied: bool
    windows: tuple[int, ...]
    chunked: bool = False
    activation: Activation = "silu"
    layer_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    qk_norm: QKNorm = "none"
    qkv_clip: float = 0.0
    interleaved: bool = False
    sinks: bool = False


def read_sizes(c: ConfigReader) -> dict[str, Any]:
    """The fields of :class:`DecoderConfig` that nearly every architecture reads alike; no window, no bias."""
    hidden_size, n_heads = c.size("hidden_size"), c.size("num_attention_heads")
    n_kv_heads = c.size("num_key_value_heads", n_heads)
    head_dim = c.size("head_dim", max(1, hidden_size // n_heads))
    if n_heads % n_kv_heads or head_dim % 2:
        raise ConfigError(f"{n_heads} heads of {head_dim} over {n_kv_heads} key-value heads do not work")
    n_layers = c.size("num_hidden_layers")
    return {
        "vocab_size": c.size("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": c.size("intermediate_size"),
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": head_dim,
        "norm": NormForm(c.number("rms_norm_eps", 1e-6)),
        "tied": c.flag("tie_word_embeddings"),
        "windows": (0,) * n_layers,
        "activation": activation_of(c.get("hidden_act", "silu")),
    }


def layer_windows(c: ConfigReader, sliding: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer: those that the config lists as sliding, or else those that ``sliding`` names."""
    return _windows(c, sliding, SLIDING, "sliding_window")


def layer_chunks(c: ConfigReader, chunked: Callable[[int], bool]) -> tuple[int, ...]:
    """The same of layers whose windows are chunks."""
    return _windows(c, chunked, CHUNKED, "attention_chunk_size")


def _windows(c: ConfigReader, seeing: Callable[[int], bool], name: str, key: str) -> tuple[int, ...]:
    """``name`` is what the config calls layers that see a window, and ``key`` that of its size."""
    n_layers = c.size("num_hidden_layers")
    kinds = c.layers("layer_types", n_layers) or [name if seeing(i) else FULL for i in range(n_layers)]
    if not set(kinds) <= {FULL, name}:
        raise ConfigError(f"layers of the kinds {sorted(set(map(str, kinds)))} are not supported")
    if c.get(key) is None:
        return (0,) * n_layers
    window = c.size(key)
    return tuple(window if kind == name else 0 for kind in kinds)


class Decoder:
    """A :class:`bough.models.base.Model`, as it is the architecture of Llama.

    Attributes:
        defaults: what configs leave out.
        norms: names of a block's norms: before and after attention, before and after the feed-forward layer; None: no
            norm there.
        config, c: its config, and the numbers of it.
        context: what its layers are made with.
    """

    causal = True
    defaults: Mapping[str, Any] = {}
    norms: tuple[str | None, str | None, str | None, str | None] = ("input", None, "post_attention", None)

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        self.context = context
        self.config = ConfigReader({**self.defaults, **config})
        self._n_positions = n_positions
        self._tables: dict[str, Tensor] = {}
        self.c = c = self.read(self.config)
        self.labels = labels_of(config)
        tied = c.tied and not self.labels
        prefix = next((p for p in PREFIXES if context.has(f"{p}embed_tokens.weight")), PREFIXES[0])
        self._embedding = Embedding(
            context, f"{prefix}embed_tokens", c.vocab_size, c.hidden_size, tied, c.embedding_scale
        )
        self._layers = [self.block(f"{prefix}layers.{i}", i) for i in range(c.n_layers)]
        self._norm = self.norm(f"{prefix}norm")
        self.vocab_size = min(n_ids, c.vocab_size)
        self._head: LMHead | ScoreHead
        if self.labels:
            self._head = ScoreHead(context, "score", len(self.labels), c.hidden_size)
        else:
            sizes = c.vocab_size, self.vocab_size, c.hidden_size
            beside = f"{prefix.removesuffix('model.')}lm_head"
            name = beside if context.has(f"{beside}.weight") else "lm_head"
            self._head = LMHead(context, name, sizes, self._embedding if tied else None, c.logit_scale, c.logit_softcap)
        context.check_all_read(self.ignores)
        if context.adapters is not None:
            context.adapters.ignores = self.ignores
        self._attention = context.attention
        self._stack = self._make_stack()
        self._steps = self._make_steps()
        self.kv_shape = KVShape(self.caches(), context.dtype)

    # -- what an architecture is

    @classmethod
    def read(cls, c: ConfigReader) -> DecoderConfig:
        """ConfigError for what is missing, or for what this architecture does not compute."""
        bias = c.flag("attention_bias")
        return DecoderConfig(**read_sizes(c), qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias"))

    def block(self, prefix: str, i: int) -> Block | ParallelBlock:
        """Layer ``i``, whose parameters' names begin with ``prefix``."""
        before, after, before_mlp, after_mlp = (
            None if name is None else self.norm(f"{prefix}.{name}_layernorm") for name in self.norms
        )
        return Block(
            self.attention(f"{prefix}.self_attn", i),
            Norms(before, after),
            self.mlp(f"{prefix}.mlp", i),
            Norms(before_mlp, after_mlp),
            self.c.residual_scale,
        )

    def attention(self, prefix: str, i: int) -> Mixer:
        """The attention of layer ``i``."""
        return Attention(self.context, prefix, self.form(i), self.rotary(i))

    def form(self, i: int) -> AttentionForm:
        """What the attention of layer ``i`` is like."""
        c = self.c
        return AttentionForm(
            hidden_size=c.hidden_size,
            n_heads=c.n_heads,
            n_kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            bias=c.qkv_bias,
            out_bias=c.out_bias,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            window=self.window(i),
            chunked=c.chunked,
            sinks=c.sinks,
            interleaved=c.interleaved,
            qk_norm=c.qk_norm,
            clip=c.qkv_clip,
            norm=c.norm,
        )

    def mlp(self, prefix: str, i: int) -> FeedForward:
        """The feed-forward layer of layer ``i``."""
        c = self.c
        return GatedMLP(self.context, prefix, c.hidden_size, c.intermediate_size, c.mlp_bias, c.activation)

    def rotary(self, i: int) -> Tensor:
        """The rotary table of layer ``i``, [n_positions, R]."""
        return self.table()

    def rope_settings(self, kind: str) -> dict[str, Any]:
        """The rotary settings of layers of this kind, as :func:`bough.device.layers.rotary.rotary_table` takes them."""
        return rope_parameters(self.config.raw, kind)

    def caches(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps."""
        c = self.c
        sizes = c.n_kv_heads, c.head_dim, c.head_dim
        return tuple(CacheSpec(*sizes, self.window(i), c.chunked and self.window(i) > 0) for i in range(c.n_layers))

    def ignores(self, name: str) -> bool:
        """Whether a parameter that nothing uses is to be expected in a checkpoint."""
        return name.endswith("rotary_emb.inv_freq") or (self.c.tied and name.endswith("lm_head.weight"))

    # -- what they are made of

    def norm(self, name: str) -> Norm:
        """A norm of the residual stream's size."""
        c = self.c
        if c.layer_norm:
            return LayerNorm(self.context, name, c.hidden_size, c.norm.eps, bias=False)
        return RMSNorm(self.context, name, c.hidden_size, c.norm)

    def window(self, i: int) -> int:
        """The window of layer ``i``; 0 also where no sequence gets longer than it."""
        window = self.c.windows[i]
        return window if window < self._n_positions else 0

    def table(self, kind: str = FULL) -> Tensor:
        """The rotary table of layers of this kind; of all of them, where the config does not tell them apart."""
        if kind not in self._tables:
            table = rotary_table(self.rope_settings(kind), self.c.head_dim, self._n_positions)
            self._tables[kind] = table.to(self.context.device)
        return self._tables[kind]

    def no_table(self) -> Tensor:
        """The table of layers that do not rotate (Kazemnejad et al. 2023), [n_positions, 0]."""
        return self._tables.setdefault("", torch.zeros(self._n_positions, 0, device=self.context.device))

    def _make_stack(self) -> LayerStack | None:
        """The op that computes all layers at once, where they and the kernels are of that kind."""
        c, layers = self.c, [layer.stacked() for layer in self._layers]
        known = [layer for layer in layers if layer is not None]
        if len(known) < len(layers) or not isinstance(self._norm, RMSNorm):
            return None
        shape = StackShape(
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            eps=c.norm.eps,
            dtype=self.context.dtype,
            gelu=c.activation == "gelu",
            residual_scale=c.residual_scale,
        )
        return self.context.ops.layer_stack(known, self._norm.weight, shape)

    def _make_steps(self) -> DecodeSteps | None:
        """The op for steps in which each row computes one token, where embedding and head are of that kind, too."""
        table, head = self._embedding.packed, self._head.packed if isinstance(self._head, LMHead) else None
        if self._stack is None or table is None or head is None or self.context.adapters is not None:
            return None
        return DecodeSteps(self._stack, table, head)

    # -- what the worker calls

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        residual = self._embedding(tokens)
        adapters = self.context.adapters
        runs = None if adapters is None else adapters.runs
        if self._stack is not None and (runs is None or self._stack.adapts):
            return self._stack(residual, self._attention.batch, k, v, runs)
        x: Tensor | None = None
        for layer, k_cache, v_cache in zip(self._layers, k, v):
            x = layer(x, residual, k_cache, v_cache)
        return self._norm(residual) if x is None else self._norm.add(x, residual)

    def decode(self, tokens: Tensor, last: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Decoded | None:
        return None if self._steps is None else self._steps(tokens, last, self._attention.batch, k, v)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)
