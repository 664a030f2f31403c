"""Rotary positions and the write of keys and values to their cells, in one pass over the projections."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.heads import Heads
from bough.device.ops.triton.launch import check, check_floats, next_power

Tensor = torch.Tensor

HEADS = 16
"""Heads of one token that a program takes."""


@triton.jit
def _write(cells, scales, at, mine, inside, first, second, rest, at_a, at_b, at_rest, left, places,
           TAIL: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """The three parts of the heads that are ``mine`` to the cells whose numbers begin at ``at`` [HEADS, 1]."""
    if QUANTIZED:
        top = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        # A NaN is lost in a maximum, but not in a sum.
        broken = tl.sum(first * 0.0, axis=1) + tl.sum(second * 0.0, axis=1)
        if TAIL:
            top = tl.maximum(top, tl.max(tl.abs(rest), axis=1))
            broken += tl.sum(rest * 0.0, axis=1)
        finite = broken == 0.0
        scale = tl.where(finite, tl.div_rn(top, 127.0), 0.0)
        divisor = tl.where(scale > 0.0, scale, float("inf"))[:, None]
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        first = (tl.div_rn(tl.where(finite[:, None], first, 0.0), divisor) + 12582912.0) - 12582912.0
        second = (tl.div_rn(tl.where(finite[:, None], second, 0.0), divisor) + 12582912.0) - 12582912.0
        if TAIL:
            rest = (tl.div_rn(tl.where(finite[:, None], rest, 0.0), divisor) + 12582912.0) - 12582912.0
        tl.store(scales + places, tl.where(finite, scale, float("nan")), mask=mine)
    if FP8:
        first = tl.clamp(first, -448.0, 448.0)
        second = tl.clamp(second, -448.0, 448.0)
        if TAIL:
            rest = tl.clamp(rest, -448.0, 448.0)
    element = cells.dtype.element_ty
    tl.store(cells + at + at_a, first.to(element), mask=inside & mine[:, None])
    tl.store(cells + at + at_b, second.to(element), mask=inside & mine[:, None])
    if TAIL:
        tl.store(cells + at + at_rest, rest.to(element), mask=left & mine[:, None])


@triton.jit
def _normed(x, q_norm, k_norm, at, inside, is_q, factor, element: tl.constexpr):
    """Part of heads times the factor of their norm and its weights at ``at``, rounded as the separate op rounds."""
    weight = tl.where(
        is_q[:, None], tl.load(q_norm + at, mask=inside, other=0.0), tl.load(k_norm + at, mask=inside, other=0.0)
    )
    rounded = (x * factor[:, None]).to(q_norm.dtype.element_ty).to(tl.float32)
    return (rounded * weight.to(tl.float32)).to(element).to(tl.float32)


@triton.jit
def rope_kv_write_kernel(
    qkv, cos_sin, positions, out_loc, q, k, v, k_scale, v_scale, q_norm, k_norm, eps,
    n_heads, n_kv_heads, dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    n_all = n_heads + 2 * n_kv_heads
    known = heads < n_all
    is_q = heads < n_heads
    is_v = (heads >= n_heads + n_kv_heads) & known
    is_k = known & (heads >= n_heads) & (heads < n_heads + n_kv_heads)
    # A head has numbers that are turned in pairs (a, b), and a rest that is not.
    column = tl.arange(0, HALF)[None, :]
    at_a = 2 * column if INTERLEAVED else column
    at_b = at_a + 1 if INTERLEAVED else half + column
    at_rest = 2 * half + tl.arange(0, TAIL if TAIL else 1)[None, :]
    inside = known[:, None] & (column < half)
    left = known[:, None] & (at_rest < dim)
    element: tl.constexpr = qkv.dtype.element_ty
    source = qkv + (token * n_all + heads[:, None]) * dim
    a = tl.load(source + at_a, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + at_b, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(source + at_rest, mask=left, other=0.0).to(tl.float32) if TAIL else a
    turns = (is_q | is_k)[:, None]
    if NORM:
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        if TAIL:
            squares += tl.sum(rest * rest, axis=1)
        factor = tl.rsqrt(squares / dim + eps)
        a = tl.where(turns, _normed(a, q_norm, k_norm, at_a, inside, is_q, factor, element), a)
        b = tl.where(turns, _normed(b, q_norm, k_norm, at_b, inside, is_q, factor, element), b)
        if TAIL:
            rest = tl.where(turns, _normed(rest, q_norm, k_norm, at_rest, left, is_q, factor, element), rest)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * half + column
    cosine = tl.load(angle, mask=column < half, other=0.0)
    sine = tl.load(angle + half, mask=column < half, other=0.0)
    # Queries and keys round to the dtype of the projections first, as separate ops would.
    first = tl.where(turns, (a * cosine - b * sine).to(element).to(tl.float32), a)
    second = tl.where(turns, (b * cosine + a * sine).to(element).to(tl.float32), b)
    at = (token * n_heads + heads[:, None]) * dim
    tl.store(q + at + at_a, first.to(element), mask=inside & is_q[:, None])
    tl.store(q + at + at_b, second.to(element), mask=inside & is_q[:, None])
    if TAIL:
        tl.store(q + at + at_rest, rest.to(element), mask=left & is_q[:, None])
    places = tl.load(out_loc + token).to(tl.int64) * n_kv_heads + heads - n_heads
    _write(k, k_scale, places[:, None] * dim, is_k, inside, first, second, rest, at_a, at_b, at_rest, left, places,
           TAIL, QUANTIZED, FP8)  # fmt: skip
    places = places - n_kv_heads
    _write(v, v_scale, places[:, None] * dim, is_v, inside, first, second, rest, at_a, at_b, at_rest, left, places,
           TAIL, QUANTIZED, FP8)  # fmt: skip


def rope_kv_write(
    qkv: Tensor, cos_sin: Tensor, positions: Tensor, out_loc: Tensor, k_cache: Cells, v_cache: Cells, heads: Heads
) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("rope_kv_write", qkv)
    n, half, n_all, norm = len(qkv), cos_sin.shape[1] // 2, heads.n_heads + 2 * heads.n_kv_heads, heads.norm
    check(
        qkv.shape[1] == n_all * heads.dim
        and k_cache.shape[1:] == v_cache.shape[1:] == (heads.n_kv_heads, heads.dim)
        and positions.shape == out_loc.shape == (n,)
        and cos_sin.shape[1] == 2 * half <= heads.dim,
        "rope_kv_write", qkv, cos_sin, positions, out_loc,
    )  # fmt: skip
    q = qkv.new_empty(n, heads.n_heads, heads.dim)
    k, k_scale = parts(k_cache)
    v, v_scale = parts(v_cache)
    tail = heads.dim - 2 * half
    if n:
        rope_kv_write_kernel[(n, triton.cdiv(n_all, HEADS))](
            qkv, cos_sin, positions, out_loc, q, k, v, k_scale, v_scale, norm.q if norm else qkv,
            norm.k if norm else qkv, norm.eps if norm else 0.0, heads.n_heads, heads.n_kv_heads, heads.dim, half,
            HEADS=HEADS, HALF=next_power(max(1, half)), TAIL=next_power(tail) if tail else 0,
            INTERLEAVED=heads.interleaved, NORM=norm is not None, QUANTIZED=isinstance(k_cache, QuantizedCells),
            FP8=k.dtype == torch.float8_e4m3fn, num_warps=4,
        )  # fmt: skip
    return q


def parts(cells: Cells) -> tuple[Tensor, Tensor]:
    """The numbers, and their scales; the numbers twice where there are none."""
    return (cells.data, cells.scale) if isinstance(cells, QuantizedCells) else (cells, cells)
