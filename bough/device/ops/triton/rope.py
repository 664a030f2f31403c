"""Rotary positions and the write of keys and values to their cells, in one pass over the projections."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.triton.launch import check, check_floats, next_power

Tensor = torch.Tensor

HEADS = 16
"""Heads of one token that a program takes."""



@triton.jit
def _write(cells, scales, at, head, inside, first, second, rest, column, tail, half, dim, places,
           TAIL: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr):  # fmt: skip
    """The three parts of heads [HEADS, ...] to the cells whose numbers begin at ``at`` [HEADS, 1]."""
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
        first = tl.where(finite[:, None], first, 0.0)
        second = tl.where(finite[:, None], second, 0.0)
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        first = (tl.div_rn(first, divisor) + 12582912.0) - 12582912.0
        second = (tl.div_rn(second, divisor) + 12582912.0) - 12582912.0
        if TAIL:
            rest = tl.where(finite[:, None], rest, 0.0)
            rest = (tl.div_rn(rest, divisor) + 12582912.0) - 12582912.0
        tl.store(scales + places, tl.where(finite, scale, float("nan")), mask=head)
    if FP8:
        first = tl.clamp(first, -448.0, 448.0)
        second = tl.clamp(second, -448.0, 448.0)
        if TAIL:
            rest = tl.clamp(rest, -448.0, 448.0)
    element = cells.dtype.element_ty
    tl.store(cells + at + column, first.to(element), mask=inside)
    tl.store(cells + at + half + column, second.to(element), mask=inside)
    if TAIL:
        tl.store(cells + at + 2 * half + tail, rest.to(element), mask=head[:, None] & (2 * half + tail < dim))


@triton.jit
def rope_kv_write_kernel(
    qkv, cos_sin, positions, out_loc, q, k, v, k_scale, v_scale, n_heads, n_kv_heads, dim, half,
    HEADS: tl.constexpr, HALF: tl.constexpr, TAIL: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    n_all = n_heads + 2 * n_kv_heads
    column = tl.arange(0, HALF)[None, :]
    known = heads < n_all
    inside = known[:, None] & (column < half)
    source = qkv + token * n_all * dim + heads[:, None] * dim
    a = tl.load(source + column, mask=inside, other=0.0)
    b = tl.load(source + half + column, mask=inside, other=0.0)
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * 2 * half + column
    cosine = tl.load(angle, mask=column < half, other=0.0)
    sine = tl.load(angle + half, mask=column < half, other=0.0)
    element = qkv.dtype.element_ty
    # Values are not turned; queries and keys round to the dtype of the projections first, as separate ops would.
    turns = (heads < n_heads + n_kv_heads)[:, None]
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    first = tl.where(turns, (wide_a * cosine - wide_b * sine).to(element).to(tl.float32), wide_a)
    second = tl.where(turns, (wide_b * cosine + wide_a * sine).to(element).to(tl.float32), wide_b)
    tail = tl.arange(0, TAIL if TAIL else 1)[None, :]
    rest = wide_a
    if TAIL:
        left = known[:, None] & (2 * half + tail < dim)
        rest = tl.load(source + 2 * half + tail, mask=left, other=0.0).to(tl.float32)
    is_q = heads < n_heads
    at = (token * n_heads + heads[:, None]) * dim
    tl.store(q + at + column, first.to(element), mask=inside & is_q[:, None])
    tl.store(q + at + half + column, second.to(element), mask=inside & is_q[:, None])
    if TAIL:
        tl.store(q + at + 2 * half + tail, rest.to(element), mask=is_q[:, None] & (2 * half + tail < dim))
    loc = tl.load(out_loc + token).to(tl.int64)
    is_k = (heads >= n_heads) & (heads < n_heads + n_kv_heads)
    places = loc * n_kv_heads + heads - n_heads
    _write(k, k_scale, places[:, None] * dim, is_k, inside & is_k[:, None], first, second, rest, column, tail,
           half, dim, places, TAIL, QUANTIZED, FP8)  # fmt: skip
    is_v = (heads >= n_heads + n_kv_heads) & known
    places = places - n_kv_heads
    _write(v, v_scale, places[:, None] * dim, is_v, inside & is_v[:, None], first, second, rest, column, tail,
           half, dim, places, TAIL, QUANTIZED, FP8)  # fmt: skip


def rope_kv_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    k_cache: Cells,
    v_cache: Cells,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("rope_kv_write", qkv)
    n, half, n_all = len(qkv), cos_sin.shape[1] // 2, n_heads + 2 * n_kv_heads
    check(
        qkv.shape[1] == n_all * head_dim
        and k_cache.shape[1:] == v_cache.shape[1:] == (n_kv_heads, head_dim)
        and positions.shape == out_loc.shape == (n,)
        and cos_sin.shape[1] == 2 * half <= head_dim,
        "rope_kv_write", qkv, cos_sin, positions, out_loc,
    )  # fmt: skip
    q = qkv.new_empty(n, n_heads, head_dim)
    k, k_scale = parts(k_cache)
    v, v_scale = parts(v_cache)
    tail = head_dim - 2 * half
    if n:
        rope_kv_write_kernel[(n, triton.cdiv(n_all, HEADS))](
            qkv, cos_sin, positions, out_loc, q, k, v, k_scale, v_scale, n_heads, n_kv_heads, head_dim, half,
            HEADS=HEADS, HALF=next_power(half), TAIL=next_power(tail) if tail else 0,
            QUANTIZED=isinstance(k_cache, QuantizedCells), FP8=k.dtype == torch.float8_e4m3fn, num_warps=4,
        )  # fmt: skip
    return q


def parts(cells: Cells) -> tuple[Tensor, Tensor]:
    """The numbers, and their scales; the numbers twice where there are none."""
    return (cells.data, cells.scale) if isinstance(cells, QuantizedCells) else (cells, cells)


