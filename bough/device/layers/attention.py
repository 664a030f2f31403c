"""Multi-head attention with grouped keys and values over the paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.layers.norm import NormForm, RMSNorm, norm_weight
from bough.device.ops.cells import Cells
from bough.device.ops.heads import HeadNorm, Heads, Scoring
from bough.device.ops.rounded import Rows

Tensor = torch.Tensor

QKNorm = Literal["none", "head", "bare", "all"]
"""What the norm of queries and keys covers: nothing, each head for itself (Qwen 3, Gemma 3), the same without weights
(Llama 4), all at once (OLMo 2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionForm:
    """What varies between the attention layers of decoders.

    Attributes:
        hidden_size: of inputs and outputs.
        n_heads, n_kv_heads, head_dim: H, KH and D.
        bias: of queries, keys and values.
        out_bias: of the output projection.
        scale: factor of the scores; None: 1 / sqrt(D).
        softcap, window, chunked: see :class:`bough.device.ops.heads.Scoring`.
        sinks: the layer has a parameter ``sinks`` [H].
        interleaved: see :class:`bough.device.ops.heads.Heads`.
        qk_norm: what the norm of queries and keys covers, ``norm`` how it is computed.
        warming: (f, s): a query at position p is multiplied by ``1 + s log(1 + floor((p + 1) / f))`` (Nakanishi 2025);
            None: it is not. For layers that do not rotate.
        clip: bound of queries, keys and values before they are rotated, behind a norm of all at once; 0 for none.
    """

    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    chunked: bool = False
    sinks: bool = False
    interleaved: bool = False
    qk_norm: QKNorm = "none"
    clip: float = 0.0
    warming: tuple[float, float] | None = None
    norm: NormForm = NormForm(1e-6)


class Attention:
    """Projections, rotation, KV write and attention of one layer.

    Queries, keys and values are parameters ``q_proj``, ``k_proj`` and ``v_proj``, or all of them ``qkv_proj``. The KV
    of all T tokens is written before any of them attends, so that rows of one step may share cells.

    Attributes:
        qkv, out: the projections.
        takes: as :class:`bough.device.layers.linear.Linear`.
        heads, scoring: how queries and keys are made, and scores become weights.
        rotary: the table of the rotary embedding.
        direct: the op that computes all layers at once knows everything that this one does.
    """

    def __init__(self, context: LayerContext, prefix: str, form: AttentionForm, rotary: Tensor) -> None:
        """``rotary`` is the table of the layer's rotary embedding [n_positions, R], R = 0 for none."""
        q_width, kv_width = form.n_heads * form.head_dim, form.n_kv_heads * form.head_dim
        qkv = [(f"{prefix}.q_proj", q_width), (f"{prefix}.k_proj", kv_width), (f"{prefix}.v_proj", kv_width)]
        if context.has(f"{prefix}.qkv_proj.weight"):
            qkv = [(f"{prefix}.qkv_proj", q_width + 2 * kv_width)]
        self.qkv = Linear(context, qkv, form.hidden_size, form.bias)
        self.out = Linear(context, [(f"{prefix}.o_proj", form.hidden_size)], q_width, form.out_bias)
        self.takes = self.qkv.takes
        self._widths = q_width, kv_width, kv_width
        self._norms: tuple[RMSNorm, RMSNorm] | None = None
        head_norm = None
        if form.qk_norm == "all":
            q_norm = RMSNorm(context, f"{prefix}.q_norm", q_width, form.norm)
            self._norms = q_norm, RMSNorm(context, f"{prefix}.k_norm", kv_width, form.norm)
        elif form.qk_norm == "head":
            q, k = (norm_weight(context, f"{prefix}.{name}_norm", form.head_dim, form.norm) for name in "qk")
            head_norm = HeadNorm(q, k, form.norm.eps)
        elif form.qk_norm == "bare":
            ones = torch.ones(form.head_dim, dtype=context.dtype, device=context.device)
            head_norm = HeadNorm(ones, ones, form.norm.eps)
        sinks = context.parameter(f"{prefix}.sinks", (form.n_heads,), torch.float32) if form.sinks else None
        scale = form.head_dim**-0.5 if form.scale is None else form.scale
        self.heads = Heads(form.n_heads, form.n_kv_heads, form.head_dim, form.interleaved, head_norm)
        self.scoring = Scoring(scale, form.softcap, form.window, sinks, form.chunked and form.window > 0)
        self.rotary = rotary
        self._clip, self._warming = form.clip, form.warming
        self.direct = self._norms is None and not form.clip and form.warming is None and not self.scoring.chunked
        self._backend = context.attention

    def __call__(self, x: Rows, k_cache: Cells, v_cache: Cells) -> Tensor:
        """[T, hidden] -> [T, hidden]; the caches are this layer's [N, KH, D]."""
        qkv = self.qkv(x)
        if self._norms is not None:
            q, k, v = torch.split(qkv, list(self._widths), dim=1)
            qkv = torch.cat((self._norms[0](q.contiguous()), self._norms[1](k.contiguous()), v), dim=1)
        if self._clip:
            qkv.clamp_(-self._clip, self._clip)
        q = self._backend.write(qkv, self.rotary, k_cache, v_cache, self.heads, self.scoring.window)
        if self._warming is not None:
            q = warmed(q, self._backend.batch.positions, *self._warming)
        return self.out(self._backend.forward(q, k_cache, v_cache, self.scoring).view(-1, self._widths[0]))


def warmed(q: Tensor, positions: Tensor, floor: float, strength: float) -> Tensor:
    """q [T, H, D] times what :class:`AttentionForm` says of ``warming`` by (``floor``, ``strength``)."""
    factor = torch.log1p(torch.floor((positions.float() + 1.0) / floor)) * strength + 1.0
    return (q * factor[:, None, None]).to(q.dtype)
