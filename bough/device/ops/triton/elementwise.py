"""Norms, activation, and rounding of inputs to 8 bits: one program per row, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.triton.launch import check, check_floats, next_power, warps

Tensor = torch.Tensor

LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""

COLUMNS = 1024
"""Outputs of the activation that one program computes."""


@triton.jit
def rms_norm_kernel(x, residual, weight, out, dim, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    values = tl.load(x + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * dim + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + row * dim + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / dim
    normed = (values * tl.rsqrt(mean + eps)).to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + at, (scale * normed).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(x, out, dim, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    gate = tl.load(x + row * 2 * dim + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * dim + dim + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(a) is 2 sigmoid(2 a) - 1, so half of one more is a sigmoid.
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + at, (active * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def round_rows_kernel(x, out, scales, dim, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < dim
    values = tl.load(x + row * dim + at, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(values), axis=0)
    # A NaN is lost in the maximum, but not in the sum; the row's results then are NaN, too.
    broken = tl.sum(values * 0.0, axis=0)
    scale = top / LARGEST
    scaled = values / tl.where(top > 0.0, scale, 1.0)
    if LARGEST == 127:
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        scaled = (scaled + 12582912.0) - 12582912.0
    tl.store(out + row * dim + at, scaled.to(out.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale + broken)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`; with ``residual``, ``add_rms_norm``."""
    check_floats("rms_norm", x, *([] if residual is None else [residual]))
    n, dim = x.shape
    check(weight.shape == (dim,) and weight.dtype in (x.dtype, torch.float32), "rms_norm", x, weight)
    if residual is not None:
        check(residual.shape == x.shape, "rms_norm", x, residual)
    out = torch.empty_like(x)
    block = next_power(dim)
    if n:
        rms_norm_kernel[(n,)](
            x, x if residual is None else residual, weight, out, dim, eps,
            ADD=residual is not None, BLOCK=block, num_warps=warps(block),
        )  # fmt: skip
    return out


def gated(x: Tensor, gelu: bool) -> Tensor:
    """``silu_mul`` or ``gelu_mul`` of :class:`bough.device.ops.registry.Ops`."""
    check_floats("the activation", x)
    n, dim = len(x), x.shape[1] // 2
    check(x.shape[1] == 2 * dim, "the activation", x)
    out = x.new_empty(n, dim)
    if n:
        gated_kernel[(n, triton.cdiv(dim, COLUMNS))](x, out, dim, GELU=gelu, BLOCK=COLUMNS, num_warps=4)
    return out


def round_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [T, K] in int8 or float8_e4m3fn and a float32 scale [T, 1] for each row, its largest magnitude over the
    largest of ``dtype``; NaN for a row that is not finite."""
    check_floats("round_rows", x)
    n, dim = x.shape
    out, scales = torch.empty_like(x, dtype=dtype), x.new_empty((n, 1), dtype=torch.float32)
    block = next_power(dim)
    if n:
        largest = 127.0 if dtype == torch.int8 else LARGEST_FP8
        round_rows_kernel[(n,)](x, out, scales, dim, LARGEST=largest, BLOCK=block, num_warps=warps(block))
    return out, scales
