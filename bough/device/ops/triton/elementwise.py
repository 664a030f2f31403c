"""Norms, activation, and rounding to 8 bits, alone or in the kernel that makes what is rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.rounded import LARGEST, RoundedRows
from bough.device.ops.triton.launch import check, check_floats, next_power, warps

Tensor = torch.Tensor

COLUMNS = 1024
"""Outputs of the activation that one program computes."""

CHUNK = 4096
"""Outputs of the activation that a program which rounds a whole row has in registers."""


@triton.jit
def scaled_down(values, scale, LARGEST: tl.constexpr):
    """``values`` over ``scale``, unless that is 0; integers where LARGEST is that of int8."""
    scaled = values / tl.where(scale > 0.0, scale, 1.0)
    if LARGEST == 127:
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        scaled = (scaled + 12582912.0) - 12582912.0
    return scaled


@triton.jit
def store_rounded(values, out, scales, row, dim, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Round one row of float32 ``values``, 0 beyond ``dim``."""
    at = tl.arange(0, BLOCK)
    scale = tl.max(tl.abs(values), axis=0) / LARGEST
    # A NaN is lost in the maximum, but not in the sum; the row's results then are NaN, too.
    broken = tl.sum(values * 0.0, axis=0)
    scaled = scaled_down(values, scale, LARGEST)
    tl.store(out + row * dim + at, scaled.to(out.dtype.element_ty), mask=at < dim)
    tl.store(scales + row, scale + broken)


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, scales, dim, eps, ADD: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
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
    result = (scale * normed).to(x.dtype.element_ty)
    if LARGEST > 0:
        store_rounded(result.to(tl.float32), out, scales, row, dim, LARGEST, BLOCK)
    else:
        tl.store(out + row * dim + at, result, mask=inside)


@triton.jit
def activated(x, row, at, dim, GELU: tl.constexpr):
    """Columns ``at`` of the activation of ``row``, in the dtype of ``x``; 0 beyond ``dim``."""
    inside = at < dim
    gate = tl.load(x + row * 2 * dim + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * 2 * dim + dim + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(a) is 2 sigmoid(2 a) - 1, so half of one more is a sigmoid.
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    return (active.to(x.dtype.element_ty).to(tl.float32) * value).to(x.dtype.element_ty)


@triton.jit
def gated_kernel(x, out, dim, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * dim + at, activated(x, row, at, dim, GELU), mask=at < dim)


@triton.jit
def gated_rounded_kernel(x, out, scales, dim, GELU: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top = tl.zeros((BLOCK,), tl.float32)
    broken = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, dim, BLOCK):
        values = activated(x, row, first + tl.arange(0, BLOCK), dim, GELU).to(tl.float32)
        top = tl.maximum(top, tl.abs(values))
        broken += values * 0.0
    scale = tl.max(top, axis=0) / LARGEST
    tl.store(scales + row, scale + tl.sum(broken, axis=0))
    # Computed once more, from the cache: a row does not fit into registers.
    for first in range(0, dim, BLOCK):
        at = first + tl.arange(0, BLOCK)
        scaled = scaled_down(activated(x, row, at, dim, GELU).to(tl.float32), scale, LARGEST)
        tl.store(out + row * dim + at, scaled.to(out.dtype.element_ty), mask=at < dim)


@triton.jit
def round_rows_kernel(x, out, scales, dim, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * dim + at, mask=at < dim, other=0.0).to(tl.float32)
    store_rounded(values, out, scales, row, dim, LARGEST, BLOCK)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`; with ``residual``, ``add_rms_norm``."""
    out = torch.empty_like(x)
    _norm(x, residual, weight, eps, out, None)
    return out


def rms_norm_rounded(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> RoundedRows:
    """See :class:`bough.device.ops.registry.Ops`."""
    out = _rounded_like(x, x.shape[1], dtype)
    _norm(x, residual, weight, eps, out.data, out.scale)
    return out


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    """Into ``out``; with ``scales``, rounded to its dtype."""
    check_floats("rms_norm", x, *([] if residual is None else [residual]))
    n, dim = x.shape
    check(weight.shape == (dim,) and weight.dtype in (x.dtype, torch.float32), "rms_norm", x, weight)
    if residual is not None:
        check(residual.shape == x.shape, "rms_norm", x, residual)
    block = next_power(dim)
    if n:
        rms_norm_kernel[(n,)](
            x, x if residual is None else residual, weight, out, weight if scales is None else scales, dim, eps,
            ADD=residual is not None, LARGEST=0.0 if scales is None else LARGEST[out.dtype], BLOCK=block,
            num_warps=warps(block),
        )  # fmt: skip


def _rounded_like(x: Tensor, dim: int, dtype: torch.dtype) -> RoundedRows:
    """Room for ``dim`` numbers in ``dtype`` for each row of x."""
    n = len(x)
    return RoundedRows(x.new_empty((n, dim), dtype=dtype), x.new_empty((n, 1), dtype=torch.float32), x.dtype)


def gated(x: Tensor, gelu: bool) -> Tensor:
    """``silu_mul`` or ``gelu_mul`` of :class:`bough.device.ops.registry.Ops`."""
    check_floats("the activation", x)
    n, dim = len(x), x.shape[1] // 2
    check(x.shape[1] == 2 * dim, "the activation", x)
    out = x.new_empty(n, dim)
    if n:
        gated_kernel[(n, triton.cdiv(dim, COLUMNS))](x, out, dim, GELU=gelu, BLOCK=COLUMNS, num_warps=4)
    return out


def gated_rounded(x: Tensor, gelu: bool, dtype: torch.dtype) -> RoundedRows:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("the activation", x)
    n, dim = len(x), x.shape[1] // 2
    check(x.shape[1] == 2 * dim, "the activation", x)
    out = _rounded_like(x, dim, dtype)
    block = min(CHUNK, next_power(dim))
    if n:
        gated_rounded_kernel[(n,)](
            x, out.data, out.scale, dim, GELU=gelu, LARGEST=LARGEST[dtype], BLOCK=block, num_warps=warps(block)
        )
    return out


def round_rows(x: Tensor, dtype: torch.dtype) -> RoundedRows:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("round_rows", x)
    n, dim = x.shape
    out = _rounded_like(x, dim, dtype)
    block = next_power(dim)
    if n:
        round_rows_kernel[(n,)](
            x, out.data, out.scale, dim, LARGEST=LARGEST[dtype], BLOCK=block, num_warps=warps(block)
        )
    return out
