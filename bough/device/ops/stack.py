"""All layers of a decoder in one call.

At one token the weights of a small model are read faster than nine ops per layer can be dispatched and joined. With
more of them, threads go from layer to layer without leaving the call, and gates meet values before they leave the
cache. The call computes what the separate ops compute, rounds where they round, and so gives the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bough.device.attention.base import AttentionBatch
from bough.device.ops.cells import Cells
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import AttentionCall, Library, PackedLinear, RopeCall, StackCall, StackLayer
from bough.device.ops.lora import LoraOp, Runs
from bough.device.ops.parts import linear_parts, pairable, takeable

Tensor = torch.Tensor

MOST_HEAD_DIM = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class StackedLayer:
    """One layer.

    Attributes:
        attention_norm, mlp_norm: weights [D] of the norms of what goes into either part, None for none.
        attention_after, mlp_after: of what comes out.
        qkv, out, gate_up, down: the packed weights of its linear layers, whose outputs lie side by side.
        heads, scoring: of its attention.
        rotary: its table [n_positions, R].
        adapted: what adapters add to the four linears; empty where the model takes none.
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
    adapted: Sequence[LoraOp] = ()

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
    """Layers, the norm after them, and room for what lies between them. Not shared between threads.

    Attributes:
        adapts: it can take tokens that have adapters.
        library: has the kernel.
        room: what lies between the layers; made anew when a call needs more.
    """

    def __init__(
        self,
        library: Library,
        cells: Callable[[Cells, Cells], tuple[int, int, int, int | None, int | None]],
        layers: Sequence[StackedLayer],
        final_norm: Tensor,
        shape: StackShape,
    ) -> None:
        """``library`` has the kernel; ``cells`` describes keys and values to it: their dtype's code and addresses, and
        those of their scales. ``final_norm`` is [D]."""
        dtype = shape.dtype
        self._function, self._cells = library.function("layer_stack"), cells
        self.library = library
        self._kept = list(layers), final_norm
        self.adapts = all(op.address is not None for layer in layers for op in layer.adapted)
        self._caches: Sequence[Cells] = ()
        self._layers = (StackLayer * len(layers))(*(_described(layer) for layer in layers))
        heads, scoring, norm = layers[0].heads, layers[0].scoring, layers[0].heads.norm
        attended = heads.n_heads * heads.dim
        written = attended + 2 * heads.n_kv_heads * heads.dim
        self._widths = written, attended, attended, shape.hidden_size, shape.intermediate_size
        self.room: list[Tensor] = []
        self._n_tokens = 0
        sizes = {"n_heads": heads.n_heads, "n_kv_heads": heads.n_kv_heads, "head_dim": heads.dim}
        rope = RopeCall(interleaved=heads.interleaved, **sizes)
        if norm is not None:
            rope.norm_wide, rope.norm_eps = norm.q.dtype != dtype, norm.eps
        attention = AttentionCall(scale=scoring.scale, softcap=scoring.softcap, **sizes)
        self._call = StackCall(
            ctypes.addressof(self._layers), final_norm.data_ptr(), None, None, None, None, rope, attention, len(layers),
            shape.hidden_size, shape.intermediate_size, None, None, None, None, -1, shape.eps, shape.residual_scale, 0,
            final_norm.dtype != dtype, shape.gelu,
        )  # fmt: skip

    def __call__(
        self, embedded: Tensor, batch: AttentionBatch, k: Sequence[Cells], v: Sequence[Cells], runs: Runs | None = None
    ) -> Tensor:
        """embedded [T, D] -> the normed hidden states [T, D] after all layers, of ``batch.ends`` where it tells; writes
        the tokens' KV.

        ``k`` and ``v`` are the caches [N, KH, D] of every layer, ``runs`` the tokens that have adapters.
        """
        self.use(k, v)
        hidden = torch.empty_like(embedded)
        call = self._describe(embedded, hidden, batch)
        call.lora = None if runs is None else runs.address
        ends = batch.ends if runs is None else None
        call.ends, call.n_ends = (None, -1) if ends is None else (ends.data_ptr(), len(ends))
        self.share(call, batch.groups, torch.get_num_threads())
        self._function(ctypes.byref(call))
        return hidden

    def use(self, k: Sequence[Cells], v: Sequence[Cells]) -> None:
        """Calls read and write these caches from now on."""
        if self._caches is not k:
            for layer, k_cache, v_cache in zip(self._layers, k, v, strict=True):
                kv_dtype, layer.k, layer.v, layer.k_scale, layer.v_scale = self._cells(k_cache, v_cache)
                self._call.rope.kv_dtype = self._call.attention.kv_dtype = kv_dtype
            self._caches = k

    def described(self, embedded: Tensor, hidden: Tensor, batch: AttentionBatch) -> StackCall:
        """A call from ``embedded`` to ``hidden`` [T, D] for a kernel that is called elsewhere, without adapters. It is
        good as long as the tensors, the caches and :attr:`room` are, and lacks what :meth:`share` sets."""
        call = StackCall.from_buffer_copy(self._describe(embedded, hidden, batch))
        call.lora, call.n_ends = None, -1
        return call

    def _describe(self, embedded: Tensor, hidden: Tensor, batch: AttentionBatch) -> StackCall:
        if len(embedded) > self._n_tokens:
            self._reserve(len(embedded), embedded.dtype)
        call = self._call
        call.embedded, call.hidden = embedded.data_ptr(), hidden.data_ptr()
        rope, attention = call.rope, call.attention
        rope.positions, rope.out_loc = batch.positions.data_ptr(), batch.out_loc.data_ptr()
        rope.n_tokens = len(embedded)
        attention.page_table, attention.table_stride = batch.page_table.data_ptr(), batch.page_table.shape[1]
        attention.rows, attention.q_start = batch.rows.data_ptr(), batch.q_start.data_ptr()
        attention.seq_len, attention.n_rows = batch.seq_len.data_ptr(), len(batch.rows)
        call.window_table = call.window_loc = None
        if batch.window is not None:
            call.window_table, call.window_loc = (tensor.data_ptr() for tensor in batch.window)
        return call

    def share(self, call: StackCall, groups: SharedGroups | None, threads: int) -> None:
        """What every step sets anew: the threads, and which rows share their first locs."""
        attention = call.attention
        call.threads = attention.threads = threads
        attention.n_groups = len(groups.tokens) if groups else 0
        if groups:
            attention.group_start, attention.group_rows = groups.start.data_ptr(), groups.rows.data_ptr()
            attention.group_tokens = groups.tokens.data_ptr()

    def _reserve(self, n_tokens: int, dtype: torch.dtype) -> None:
        """Make room for what lies between the layers of so many tokens."""
        self._n_tokens = n_tokens
        self.room = [torch.empty(n_tokens, width, dtype=dtype) for width in self._widths]
        qkv, q, attended, x, act = (tensor.data_ptr() for tensor in self.room)
        call = self._call
        call.rope.qkv, call.rope.q, call.x, call.act = qkv, q, x, act
        call.attention.q, call.attention.out = q, attended


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
        and all(takeable(parts) for layer in layers for parts in layer.linears)
        and all(pairable(layer.gate_up, shape.intermediate_size) for layer in layers)
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
    adapted = [op.address for op in layer.adapted] or [None] * 4
    return StackLayer(
        *map(_address, layer.norms), *map(linear_parts, layer.linears), None, None, None, None, *adapted,
        *map(_address, (rotary, q_norm, k_norm, scoring.sinks)), rotary.shape[1], scoring.window,
    )  # fmt: skip


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
