"""All layers of a decoder in one call, for the few tokens of a decode step.

At one token the weights of a small model are read faster than nine ops per layer can be dispatched and joined. The
call computes what the separate ops compute, rounds where they round, and so gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bough.device.attention.base import AttentionBatch
from bough.device.ops.cells import Cells
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import AttentionCall, LinearParts, PackedLinear, RopeCall, StackCall, StackLayer

Tensor = torch.Tensor

MOST_TOKENS = StackCall.MOST_TOKENS
MOST_HEAD_DIM = 512
PANEL = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedLayer:
    """One layer.

    Attributes:
        attention_norm, mlp_norm: weights [D] of the norms of what goes into either part, None for none.
        attention_after, mlp_after: of what comes out.
        qkv, out, gate_up, down: the packed weights of its linear layers, whose outputs lie side by side.
        heads, scoring: of its attention.
        rotary: its table [n_positions, R].
    """

    attention_norm: Tensor | None
    attention_after: Tensor | None
    mlp_norm: Tensor | None
    mlp_after: Tensor | None
    qkv: Sequence[PackedLinear]
    out: Sequence[PackedLinear]
    gate_up: Sequence[PackedLinear]
    down: Sequence[PackedLinear]
    heads: Heads
    scoring: Scoring
    rotary: Tensor

    @property
    def linears(self) -> tuple[Sequence[PackedLinear], ...]:
        """All four."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """All four."""
        return self.attention_norm, self.attention_after, self.mlp_norm, self.mlp_after


@dataclass(frozen=True, kw_only=True, slots=True)
class StackShape:
    """What all layers of a stack have in common.

    Attributes:
        hidden_size, intermediate_size: of the residual stream and between the projections of the feed-forward layer.
        eps: of the norms.
        dtype: that is computed in.
        gelu: the gate's activation is gelu and not silu.
        residual_scale: factor of what attention and feed-forward layer add.
    """

    hidden_size: int
    intermediate_size: int
    eps: float
    dtype: torch.dtype
    gelu: bool = False
    residual_scale: float = 1.0


class LayerStack:
    """Layers, the norm after them, and room for what lies between them. Not shared between threads."""

    def __init__(
        self,
        function: Callable[..., None],
        cells: Callable[[Cells, Cells], tuple[int, int, int, int | None, int | None]],
        layers: Sequence[StackedLayer],
        final_norm: Tensor,
        shape: StackShape,
    ) -> None:
        """``function`` is the kernel; ``cells`` describes keys and values to it: their dtype's code and addresses, and
        those of their scales. ``final_norm`` is [D]."""
        dtype, t = shape.dtype, MOST_TOKENS
        self._function, self._cells = function, cells
        self._kept = list(layers), final_norm
        self._caches: Sequence[Cells] = ()
        self._layers = (StackLayer * len(layers))(*(_described(layer) for layer in layers))
        heads, scoring, norm = layers[0].heads, layers[0].scoring, layers[0].heads.norm
        room = [
            torch.empty(t, width, dtype=dtype)
            for width in (
                (heads.n_heads + 2 * heads.n_kv_heads) * heads.dim,
                heads.n_heads * heads.dim,
                heads.n_heads * heads.dim,
                shape.hidden_size,
                shape.intermediate_size,
            )
        ]
        self._room = room
        qkv, q, attended, x, act = (tensor.data_ptr() for tensor in room)
        sizes = {"n_heads": heads.n_heads, "n_kv_heads": heads.n_kv_heads, "head_dim": heads.dim}
        rope = RopeCall(qkv=qkv, q=q, interleaved=heads.interleaved, **sizes)
        if norm is not None:
            rope.norm_wide, rope.norm_eps = norm.q.dtype != dtype, norm.eps
        attention = AttentionCall(q=q, out=attended, scale=scoring.scale, softcap=scoring.softcap, **sizes)
        self._call = StackCall(
            ctypes.addressof(self._layers), final_norm.data_ptr(), None, None, x, act, rope, attention, len(layers),
            shape.hidden_size, shape.intermediate_size, shape.eps, shape.residual_scale, 0, final_norm.dtype != dtype,
            shape.gelu,
        )  # fmt: skip

    def __call__(self, embedded: Tensor, batch: AttentionBatch, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        """embedded [T, D], T <= MOST_TOKENS -> the normed hidden states [T, D] after all layers; writes the tokens' KV.

        ``k`` and ``v`` are the caches [N, KH, D] of every layer.
        """
        if self._caches is not k:
            for layer, k_cache, v_cache in zip(self._layers, k, v, strict=True):
                kv_dtype, layer.k, layer.v, layer.k_scale, layer.v_scale = self._cells(k_cache, v_cache)
                self._call.rope.kv_dtype = self._call.attention.kv_dtype = kv_dtype
            self._caches = k
        hidden = torch.empty_like(embedded)
        call, threads = self._call, torch.get_num_threads()
        call.embedded, call.hidden, call.threads = embedded.data_ptr(), hidden.data_ptr(), threads
        rope, attention = call.rope, call.attention
        rope.positions, rope.out_loc = batch.positions.data_ptr(), batch.out_loc.data_ptr()
        rope.n_tokens = len(embedded)
        attention.page_table, attention.table_stride = batch.page_table.data_ptr(), batch.page_table.shape[1]
        attention.rows, attention.q_start = batch.rows.data_ptr(), batch.q_start.data_ptr()
        attention.seq_len, attention.n_rows = batch.seq_len.data_ptr(), len(batch.rows)
        attention.threads = threads
        groups = batch.groups
        attention.n_groups = len(groups.tokens) if groups else 0
        if groups:
            attention.group_start, attention.group_rows = groups.start.data_ptr(), groups.rows.data_ptr()
            attention.group_tokens = groups.tokens.data_ptr()
        self._function(ctypes.byref(call))
        return hidden


def stackable(layers: Sequence[StackedLayer], final_norm: Tensor, shape: StackShape) -> bool:
    """Whether the kernel can compute these layers."""
    if not layers:
        return False
    heads = layers[0].heads
    return (
        shape.dtype == torch.bfloat16
        and heads.dim % 16 == 0
        and heads.dim <= MOST_HEAD_DIM
        and len({_common(layer) for layer in layers}) == 1
        and all(norm is None or norm.dtype == final_norm.dtype for layer in layers for norm in layer.norms)
        and all(1 <= len(parts) <= LinearParts.MOST for layer in layers for parts in layer.linears)
        # Gates and values are paired by panels, so in one weight the values have to begin with one.
        and all(len(layer.gate_up) == 2 or shape.intermediate_size % PANEL == 0 for layer in layers)
    )


def _common(layer: StackedLayer) -> tuple[object, ...]:
    """What has to be the same in all layers."""
    heads, norm = layer.heads, layer.heads.norm
    form = None if norm is None else (norm.q.dtype, norm.k.dtype, norm.eps)
    sizes = heads.n_heads, heads.n_kv_heads, heads.dim, heads.interleaved
    return *sizes, form, layer.scoring.scale, layer.scoring.softcap


def _described(layer: StackedLayer) -> StackLayer:
    norm, scoring, rotary = layer.heads.norm, layer.scoring, layer.rotary
    q_norm, k_norm = (None, None) if norm is None else (norm.q, norm.k)
    return StackLayer(
        *map(_address, layer.norms), *map(_parts, layer.linears), None, None, None, None,
        *map(_address, (rotary, q_norm, k_norm, scoring.sinks)), rotary.shape[1], scoring.window,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _parts(linear: Sequence[PackedLinear]) -> LinearParts:
    addresses = [ctypes.addressof(part) for part in linear]
    return LinearParts((ctypes.c_void_p * LinearParts.MOST)(*addresses), len(addresses))
