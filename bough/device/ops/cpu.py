"""The ops as compiled kernels, called with raw pointers; the GIL is free meanwhile."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch

from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.compact import Compactor, CompactWeight
from bough.device.ops.experts import Clamp, ExpertParts, FusedExperts, fusable
from bough.device.ops.fixed import exponents
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import (
    AttentionCall,
    Library,
    LogprobCall,
    PackedLinear,
    QuantiseCall,
    RopeCall,
    SampleCall,
)
from bough.device.ops.lora import DenseLora, LoraOp, PackedLora, adapter_arena, packable
from bough.device.ops.packed import Kind, PackedWeight, empty
from bough.device.ops.parts import describe
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.rounded import RoundsBehind
from bough.device.ops.sampling import Draws, TokenLogprobs
from bough.device.ops.stack import LayerStack, StackedLayer, StackShape, stackable
from bough.device.ops.suited import for_tiles

Tensor = torch.Tensor

log = logging.getLogger(__name__)

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}

MAX_HEAD_DIM = 512
"""Of csrc/elementwise.h: larger heads are written to cells of the queries' dtype only."""

PANEL = 64
"""Outputs per panel of a packed linear weight; TILE of csrc/tile.h."""


class CpuOps(RoundsBehind):
    """:class:`bough.device.ops.registry.Ops` by the shared library.

    Uses as many threads as torch does. Attention with a head dimension that is not a multiple of 16 falls back to
    the reference, with one warning. bfloat16 attention has float32's independence of batch and chunks, too.

    Attributes:
        library: has the kernels.
        compact: makes the second forms of bfloat16 weights.
    """

    name = "cpu"

    def __init__(self, library: Library, reason: str, spare: Callable[[], int] | None = None) -> None:
        """``spare``: bytes that weights may take a second time, in forms that few rows read faster, asked before each
        of them; None: any."""
        self.reason = reason
        self.library = library
        self._reference = ReferenceOps(reason)
        self._adapters = adapter_arena()
        self.compact = Compactor(library, spare)
        self._rms_norm = library.function("rms_norm")
        self._add_rms_norm = library.function("add_rms_norm")
        self._silu_mul = library.function("silu_mul")
        self._gelu_mul = library.function("gelu_mul")
        self._rope_kv_write = library.function("rope_kv_write")
        self._paged_attention = library.function("paged_attention")
        self._argmax = library.function("argmax")
        self._apply_bitmask = library.function("apply_bitmask")
        self._masked_argmax = library.function("masked_argmax")
        self._sample = library.function("sample")
        self._logprobs = library.function("logprobs")
        self._linear = library.function("linear")
        self._packed_linear = library.function("packed_linear")
        self._packed_rows = library.function("packed_rows")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, (n, dim) = _norm_dtype(weight, x), x.shape
        _check(weight.shape == (dim,), "rms_norm", x, weight)
        out = torch.empty_like(x)
        threads = torch.get_num_threads()
        self._rms_norm(dtype, x.data_ptr(), weight.data_ptr(), out.data_ptr(), n, dim, eps, threads)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        dtype, (n, dim) = _norm_dtype(weight, x, residual), x.shape
        _check(residual.shape == x.shape and weight.shape == (dim,), "add_rms_norm", x, residual, weight)
        out = torch.empty_like(x)
        pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr()
        self._add_rms_norm(dtype, *pointers, n, dim, eps, torch.get_num_threads())
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        return _gated("silu_mul", self._silu_mul, x)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return _gated("gelu_mul", self._gelu_mul, x)

    def rope_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        heads: Heads,
    ) -> Tensor:
        dtype, n, rotary = _dtype(qkv), len(qkv), cos_sin.shape[1]
        n_heads, n_kv_heads, dim = heads.n_heads, heads.n_kv_heads, heads.dim
        kv_dtype, k, v, k_scale, v_scale = _cells(k_cache, v_cache)
        if dim > MAX_HEAD_DIM and (heads.norm or kv_dtype != dtype):
            raise ValueError(f"heads of {dim} cannot be normed or written as {k_cache.dtype}")
        _check(
            qkv.shape == (n, (n_heads + 2 * n_kv_heads) * dim)
            and k_cache.shape[1:] == v_cache.shape[1:] == (n_kv_heads, dim)
            and positions.shape == out_loc.shape == (n,)
            and rotary % 2 == 0
            and rotary <= dim,
            "rope_kv_write", qkv, cos_sin, positions, out_loc,
        )  # fmt: skip
        _check(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "rope_kv_write", cos_sin)
        _check_ints("rope_kv_write", positions, out_loc)
        q_norm, k_norm, norm_wide, norm_eps = _head_norm(heads, qkv)
        q = qkv.new_empty(n, n_heads, dim)
        call = RopeCall(
            qkv.data_ptr(), cos_sin.data_ptr(), positions.data_ptr(), out_loc.data_ptr(), k, v, k_scale, v_scale,
            q.data_ptr(), q_norm, k_norm, n, n_heads, n_kv_heads, dim, rotary, torch.get_num_threads(), kv_dtype,
            heads.interleaved, norm_wide, norm_eps,
        )  # fmt: skip
        self._rope_kv_write(dtype, ctypes.byref(call))
        return q

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_len: Tensor,
        scoring: Scoring,
        groups: SharedGroups | None = None,
    ) -> Tensor:
        dtype, (_, n_heads, dim), n_kv_heads = _dtype(q), q.shape, k_cache.shape[1]
        if dim % 16:
            _warn_of_heads(dim)
            return self._reference.paged_attention(q, k_cache, v_cache, page_table, rows, q_start, seq_len, scoring)
        n, sinks = len(rows), scoring.sinks
        _check(
            k_cache.shape[1:] == v_cache.shape[1:] == (n_kv_heads, dim)
            and n_heads % n_kv_heads == 0
            and q_start.shape == (n + 1,)
            and seq_len.shape == (n,)
            and int(q_start[-1]) == len(q),
            "paged_attention", q, rows, q_start, seq_len,
        )  # fmt: skip
        _check_ints("paged_attention", page_table, rows, q_start, seq_len)
        _check(
            bool(((seq_len >= q_start.diff()) & (seq_len <= page_table.shape[1])).all()),
            "paged_attention", page_table, q_start, seq_len,
        )  # fmt: skip
        if sinks is not None:
            fits = sinks.shape == (n_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous()
            _check(fits, "paged_attention", q, sinks)
        kv_dtype, k, v, k_scale, v_scale = _cells(k_cache, v_cache)
        # Rows of a group see different parts of their prefix through a window.
        shared = (groups.start, groups.rows, groups.tokens) if groups and not scoring.window else ()
        _check_ints("paged_attention", *shared)
        where: list[int | None] = [t.data_ptr() for t in shared]
        out = torch.empty_like(q)
        call = AttentionCall(
            q.data_ptr(), k, v, out.data_ptr(), page_table.data_ptr(), rows.data_ptr(), q_start.data_ptr(),
            seq_len.data_ptr(), k_scale, v_scale, *(where or [None] * 3), None if sinks is None else sinks.data_ptr(),
            page_table.shape[1], n, n_heads, n_kv_heads, dim, scoring.scale, torch.get_num_threads(), kv_dtype,
            len(shared[2]) if shared else 0, scoring.softcap, scoring.window, scoring.chunked,
        )  # fmt: skip
        self._paged_attention(dtype, ctypes.byref(call))
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        dtype, (n, vocab) = _dtype(logits), logits.shape
        out = torch.empty(n, dtype=torch.int64)
        self._argmax(dtype, logits.data_ptr(), out.data_ptr(), n, vocab, torch.get_num_threads())
        return out

    def apply_bitmask(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        dtype, pointers = _dtype(logits), _masked("apply_bitmask", logits, masks, rows)
        self._apply_bitmask(dtype, *pointers, len(rows), logits.shape[1], torch.get_num_threads())

    def penalise(self, logits: Tensor, entries: Tensor) -> None:
        self._reference.penalise(logits, entries)

    def masked_argmax(self, logits: Tensor, masks: Tensor, rows: Tensor, tokens: Tensor) -> None:
        dtype, pointers = _dtype(logits), _masked("masked_argmax", logits, masks, rows)
        n, vocab = logits.shape
        _check(tokens.shape == (n,) and tokens.dtype == torch.int64 and tokens.is_contiguous(), "masked_argmax", tokens)
        self._masked_argmax(dtype, *pointers, tokens.data_ptr(), len(rows), vocab, torch.get_num_threads())

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        dtype, (n, vocab) = _dtype(logits), logits.shape
        _check(draws.n == n and draws.best.dtype == torch.int64 and draws.best.is_contiguous(), "sample", logits)
        out = torch.empty(n, dtype=torch.int64)
        arrays = (
            draws.temperature, draws.top_k, draws.top_p, draws.least_z, draws.seeds, draws.positions,
        )  # fmt: skip
        addresses = draws.best.data_ptr(), *(a.ctypes.data for a in arrays)
        call = SampleCall(logits.data_ptr(), *addresses, out.data_ptr(), n, vocab, torch.get_num_threads())
        self._sample(dtype, ctypes.byref(call))
        return out

    def logprobs(self, logits: Tensor, tokens: Tensor, n_top: int, asked: Tensor) -> TokenLogprobs:
        dtype, (n, vocab) = _dtype(logits), logits.shape
        for ids in (tokens, asked):
            _check(ids.dtype == torch.int64 and ids.dim() == 1 and ids.is_contiguous(), "logprobs", logits, ids)
        _check(len(tokens) == n and 0 <= n_top <= vocab, "logprobs", logits, tokens)
        out = TokenLogprobs.empty(n, n_top, len(asked))
        call = LogprobCall(
            logits.data_ptr(), tokens.data_ptr(), asked.data_ptr(), out.chosen.data_ptr(), out.ranks.data_ptr(),
            out.top_ids.data_ptr(), out.top.data_ptr(), out.asked.data_ptr(), n, vocab, n_top, len(asked),
            torch.get_num_threads(),
        )  # fmt: skip
        self._logprobs(dtype, ctypes.byref(call))
        return out

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """Keeps a packed copy of the weight, and the bias."""
        _check(_dtype(weight, *([] if bias is None else [bias])) == 0, "linear", weight)
        n_out, n_in = weight.shape
        packed = weight.new_zeros(-(-n_out // PANEL) * PANEL, n_in)
        packed[:n_out] = weight
        packed = packed.view(-1, PANEL, n_in).transpose(1, 2).contiguous()
        bias_pointer = None if bias is None else bias.data_ptr()

        def apply(x: Tensor) -> Tensor:
            _check(_dtype(x) == 0 and x.shape[1:] == (n_in,), "linear", x, packed, bias)
            out = x.new_empty(len(x), n_out)
            pointers = x.data_ptr(), packed.data_ptr(), bias_pointer, out.data_ptr()
            self._linear(*pointers, len(x), n_in, n_out, torch.get_num_threads())
            return out

        return apply

    def quantise(self, kind: Kind, weight: Tensor) -> PackedWeight:
        if kind not in (Kind.ROTATED, Kind.Q4_K):
            return self._reference.quantise(kind, weight)
        dtype, (n_out, n_in) = _dtype(weight), weight.shape
        packed = empty(kind, n_out, n_in)
        assert packed.scale is not None
        call = QuantiseCall(
            weight.data_ptr(), packed.weight.data_ptr(), packed.scale.data_ptr(),
            None if packed.sub is None else packed.sub.data_ptr(), n_out, n_in, kind, torch.get_num_threads(),
        )  # fmt: skip
        self.library.function("quantise")(dtype, ctypes.byref(call))
        return packed

    def suited(self, weight: PackedWeight) -> PackedWeight:
        return for_tiles(weight, self.quantise) if self._has_tiles else weight

    @property
    def _has_tiles(self) -> bool:
        return self.library.isa() == "amx"

    def packed_linear(self, weight: PackedWeight, bias: Tensor | None) -> PackedCall:
        if weight.kind == Kind.Q4_WHOLE and not self._has_tiles:
            raise ValueError("Q4_WHOLE weights are for processors with AMX")
        forms = self.compact(weight), exponents(self.library, weight)
        return PackedCall(self._packed_linear, weight, bias, *forms)

    def layer_stack(self, layers: Sequence[StackedLayer], final_norm: Tensor, shape: StackShape) -> LayerStack | None:
        if not stackable(layers, final_norm, shape):
            return None
        return LayerStack(self.library, _cells, layers, final_norm, shape)

    def experts(
        self, experts: Sequence[ExpertParts], sizes: tuple[int, int], clamp: Clamp | None
    ) -> FusedExperts | None:
        if not fusable(experts, sizes[1]):
            return None
        return FusedExperts(self.library.function("experts"), experts, sizes, clamp)

    def lora(self, sizes: Sequence[int], n_in: int, n_places: int, dtype: torch.dtype) -> LoraOp:
        if not packable(sizes, n_in, dtype):
            return DenseLora(self._reference.linear if dtype != torch.float32 else self.linear, sizes, dtype)
        return PackedLora(self.library.function("lora"), sizes, n_in, n_places, self._adapters)

    def packed_rows(self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        _check_ints("packed_rows", ids)
        out = torch.empty(len(ids), weight.n_in, dtype=dtype)
        packed = ctypes.byref(describe(weight))
        threads = torch.get_num_threads()
        self._packed_rows(_dtype(out), packed, ids.data_ptr(), len(ids), out.data_ptr(), threads)
        return out


class PackedCall:
    """Multiplies with one packed weight; ``packed`` describes it to other kernels and lives as long as this does."""

    rounded = None
    stored = None

    def __init__(
        self,
        function: Callable[..., None],
        weight: PackedWeight,
        bias: Tensor | None,
        compact: CompactWeight | None,
        exponents: Tensor | None,
    ) -> None:
        self._function = function
        self._weight, self._bias = weight, None if bias is None else bias.float().contiguous()
        self._forms = compact, exponents
        self.packed: PackedLinear | None = describe(weight, self._bias, compact, exponents)
        self._address = ctypes.addressof(self.packed)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        n_in, n_out = self._weight.n_in, self._weight.n_out
        if out is None:
            out = x.new_empty(len(x), n_out)
        fits = x.shape[1:] == (n_in,) and out.shape == (len(x), n_out) and out.stride(1) == 1 and out.dtype == x.dtype
        _check(fits, "packed_linear", x, out)
        pointers = self._address, x.data_ptr(), out.data_ptr()
        self._function(_dtype(x), *pointers, out.stride(0), len(x), torch.get_num_threads())
        return out


def _gated(op: str, function: Callable[..., None], x: Tensor) -> Tensor:
    dtype, (n, dim) = _dtype(x), x.shape
    _check(dim % 2 == 0, op, x)
    out = x.new_empty(n, dim // 2)
    function(dtype, x.data_ptr(), out.data_ptr(), n, dim // 2, torch.get_num_threads())
    return out


def _norm_dtype(weight: Tensor, *tensors: Tensor) -> int:
    """The code of what a norm takes: 2 for a float32 weight beside bfloat16, else the one dtype of all."""
    if weight.dtype == torch.float32 and _dtype(*tensors) == 1:
        _dtype(weight)
        return 2
    return _dtype(weight, *tensors)


def _head_norm(heads: Heads, qkv: Tensor) -> tuple[int | None, int | None, bool, float]:
    """The norm of queries and keys: addresses of the weights, whether these are float32 beside bfloat16, epsilon."""
    norm = heads.norm
    if norm is None:
        return None, None, False, 0.0
    _check(norm.q.shape == norm.k.shape == (heads.dim,), "rope_kv_write", norm.q, norm.k)
    wide = _norm_dtype(norm.q, qkv) == _norm_dtype(norm.k, qkv) == 2
    _check(norm.q.dtype == norm.k.dtype, "rope_kv_write", norm.q, norm.k)
    return norm.q.data_ptr(), norm.k.data_ptr(), wide, norm.eps


def _dtype(*tensors: Tensor) -> int:
    """The code of the dtype that all of them have, one that is computed in; ValueError otherwise."""
    code = _code(*tensors)
    if code > 1:
        raise ValueError(f"the kernels compute in float32 or bfloat16, not {tensors[0].dtype}")
    return code


def _code(*tensors: Tensor) -> int:
    """The code of the dtype that all of them have; ValueError if they differ or one is not contiguous."""
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"expected contiguous tensors of one dtype, got {_shown(tensors)}")
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"the kernels compute in float32 or bfloat16 and know no {dtype}")
    return code


def _cells(k: Cells, v: Cells) -> tuple[int, int, int, int | None, int | None]:
    """The code of their dtype, and the addresses of keys, values and, for int8, of the scales of both."""
    if isinstance(k, QuantizedCells) and isinstance(v, QuantizedCells):
        _dtype(k.scale, v.scale)
        scales = k.scale.data_ptr(), v.scale.data_ptr()
        return _code(k.data, v.data), k.data.data_ptr(), v.data.data_ptr(), *scales
    if isinstance(k, QuantizedCells) or isinstance(v, QuantizedCells):
        raise ValueError("either both keys and values are int8 or neither")
    return _code(k, v), k.data_ptr(), v.data_ptr(), None, None


def _masked(op: str, logits: Tensor, masks: Tensor, rows: Tensor) -> tuple[int, int, int]:
    """Addresses of ``logits`` [S, V], ``masks`` [R, ceil(V / 32)] and ``rows`` [R], which fit together."""
    n, vocab = logits.shape
    _check(masks.shape == (len(rows), -(-vocab // 32)) and rows.dim() == 1, op, logits, masks, rows)
    _check_ints(op, masks)
    _check(rows.dtype == torch.int64 and rows.is_contiguous(), op, rows)
    if len(rows):
        indices = rows.numpy()
        _check(0 <= indices.min() and indices.max() < n, op, logits, masks, rows)
    return logits.data_ptr(), masks.data_ptr(), rows.data_ptr()


def _check_ints(op: str, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{op} takes contiguous int32 indices, got {_shown(tensors)}")


def _check(fits: bool, op: str, *tensors: Tensor | None) -> None:
    if not fits:
        raise ValueError(f"{op} cannot take {_shown(tensors)}")


def _shown(tensors: tuple[Tensor | None, ...]) -> str:
    return ", ".join("nothing" if t is None else f"{t.dtype} {list(t.shape)}" for t in tensors)


@cache
def _warn_of_heads(dim: int) -> None:
    log.warning("heads of %d dimensions, which 16 does not divide, are left to torch: attention is slow", dim)
