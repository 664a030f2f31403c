"""Linear layers with weights of 4 and 8 bits.

Weights of :class:`bough.device.ops.packed.PackedWeight` are laid out once more for the device: bytes of one output lie
together, and every kind but INT8 becomes ``q * scale + offset`` with one pair for a few inputs. Those are multiplied in
the dtype of the inputs, with the weight widened on its way to the tensor cores (W4A16, W8A16); INT8 multiplies integers
(W8A8), with one scale for each row of inputs.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from bough.device.ops.experts import INPUTS, HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.packed import (
    DOUBLED_FP4,
    FOUR_BITS,
    GROUP,
    PAIRED,
    PANEL,
    ZERO,
    Kind,
    PackedWeight,
    from_panels,
    panels,
    unpack,
)
from bough.device.ops.rounded import RoundedRows
from bough.device.ops.triton.elementwise import round_rows
from bough.device.ops.triton.launch import check

Tensor = torch.Tensor


@triton.jit
def numbers(q, FLOATS: tl.constexpr):
    """What integers stand for, float32; FLOATS: they are codes of 4-bit floats, twice whose values it is."""
    if FLOATS:
        # Two bits of exponent and one of mantissa: 0, 1, 2, 3, 4, 6, 8, 12.
        size = q & 7
        size = tl.where(size < 2, size, (2 | (size & 1)) << (tl.maximum(size >> 1, 1) - 1))
        return tl.where((q & 8) != 0, -size.to(tl.float32), size.to(tl.float32))
    return q.to(tl.float32)


@triton.jit
def add_product(total, low, high, packed, scale, offset, inputs, n, columns, there,
                BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """``total`` plus the product of some inputs with bytes of weight [B, N] at ``inputs`` and ``columns``.

    ``low`` are inputs of the halves of bytes that are low, or of whole bytes, ``high`` those of high ones.
    """
    packed = packed.to(tl.int32)
    place = (inputs // GROUP)[:, None] * n + columns[None, :]
    factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
    added = tl.load(offset + place, mask=there, other=0.0).to(tl.float32)
    values = numbers((packed & 15) if BITS == 4 else packed, FLOATS) * factor + added
    total = tl.dot(low, values.to(low.dtype), total, input_precision=PRECISION)
    if BITS == 4:
        if GROUP < 32:
            place = ((inputs + 16) // GROUP)[:, None] * n + columns[None, :]
            factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
            added = tl.load(offset + place, mask=there, other=0.0).to(tl.float32)
        values = numbers(packed >> 4, FLOATS) * factor + added
        total = tl.dot(high, values.to(high.dtype), total, input_precision=PRECISION)
    return total


@triton.jit
def grouped_kernel(
    x, weight, scale, offset, bias, out, m, n, n_in, n_bytes, x_stride, out_stride,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = x + rows[:, None].to(tl.int64) * x_stride
    known_m, known_n = (rows < m)[:, None], (columns < n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, n_bytes, BLOCK_B):
        at = first + tl.arange(0, BLOCK_B)
        there = (at < n_bytes)[:, None] & known_n
        packed = tl.load(weight + columns[None, :].to(tl.int64) * n_bytes + at[:, None], mask=there, other=0)
        # 16 bytes hold 32 inputs of 4 bits: the first 16 in their low halves.
        inputs = at // 16 * 32 + at % 16 if BITS == 4 else at
        low = tl.load(line + inputs[None, :], mask=known_m & (inputs < n_in)[None, :], other=0.0)
        high = low
        if BITS == 4:
            high = tl.load(line + inputs[None, :] + 16, mask=known_m & (inputs + 16 < n_in)[None, :], other=0.0)
        total = add_product(
            total, low, high, packed, scale, offset, inputs, n, columns, there, BITS, FLOATS, GROUP, PRECISION
        )
    if BIAS:
        total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known_m & known_n)


@triton.jit
def rounded_kernel(
    x, x_scale, weight, scale, bias, out, m, n, n_in, n_blocks, out_stride,
    INTEGERS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """8 bits times 8 bits; GROUP inputs of an output share a scale, all of them where it is 0."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known_m, known_n = (rows < m)[:, None], (columns < n)[None, :]
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if GROUP else SUM)
    factors = scale + columns.to(tl.int64) * n_blocks
    for first in range(0, n_in, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        inside = at < n_in
        a = tl.load(x + rows[:, None].to(tl.int64) * n_in + at[None, :], mask=known_m & inside[None, :], other=0.0)
        b = tl.load(
            weight + columns[None, :].to(tl.int64) * n_in + at[:, None], mask=inside[:, None] & known_n, other=0.0
        )
        if GROUP:
            factor = tl.load(factors + first // GROUP, mask=columns < n, other=0.0)
            total += tl.dot(a, b, out_dtype=SUM).to(tl.float32) * factor[None, :]
        else:
            total = tl.dot(a, b, total, out_dtype=SUM)
    result = total.to(tl.float32) * tl.load(x_scale + rows, mask=rows < m, other=0.0)[:, None]
    if GROUP == 0:
        result = result * tl.load(factors, mask=columns < n, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=known_m & known_n)


def grouped_blocks(m: int) -> tuple[int, int, int, int]:
    """Rows, outputs and bytes of weight that a program takes at a time, and its warps, for ``m`` rows."""
    return (16, 32, 64, 4) if m <= 16 else (64, 64, 32, 4) if m <= 64 else (128, 64, 32, 8)


def rounded_blocks(m: int) -> tuple[int, int, int]:
    """Rows and outputs that a program takes at a time, and its warps, for ``m`` rows."""
    return (16, 64, 4) if m <= 16 else (64, 64, 4) if m <= 64 else (128, 128, 8)


class GroupedLinear:
    """:class:`bough.device.ops.registry.PackedApply` of a kind with scales for groups of inputs."""

    packed: PackedLinear | None = None
    rounded = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        data = bytes_of(weight).to(device)
        floats = codes_of(data) if weight.kind == Kind.Q8 and weight.group == GROUP else None
        form: Literal["4", "8", "fp4"] = "fp4" if floats is not None else "4" if weight.kind in FOUR_BITS else "8"
        scale, offset, group = pairs_of(weight)
        scale, offset = scale.T.contiguous().to(device), offset.T.contiguous().to(device)
        if floats is not None:
            data, offset = floats, torch.zeros_like(offset)
        self.stored = HeldWeight(data, bias, scale, offset, group, form)
        self._n_in, self._n_out = weight.n_in, weight.n_out

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        m, n = len(x), self._n_out
        held = self.stored
        assert held.scale is not None and held.offset is not None
        check(x.dim() == 2 and x.shape[1] == self._n_in and x.stride(1) == 1, "packed_linear", x, held.weight)
        out = x.new_empty(m, n) if out is None else out
        if m == 0:
            return out
        block_m, block_n, block_b, warps = grouped_blocks(m)
        grouped_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
            x, held.weight, held.scale, held.offset, x if held.bias is None else held.bias, out, m, n, self._n_in,
            held.weight.shape[1], x.stride(0), out.stride(0), BITS=8 if held.form == "8" else 4,
            FLOATS=held.form == "fp4", GROUP=held.group, BIAS=held.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n,
            BLOCK_B=block_b, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out


def codes_of(data: Tensor) -> Tensor | None:
    """uint8 [N, K], integers of Q8 that are twice 4-bit floats, as codes of these: uint8 [N, K / 2], laid out as other
    weights of 4 bits; None for others."""
    known = torch.full((256,), 255, dtype=torch.uint8)
    for code, doubled in reversed(list(enumerate(DOUBLED_FP4))):
        known[ZERO[Kind.Q8] + doubled] = code
    codes = known.to(data.device)[data.int()].view(len(data), -1, 2, 16)
    return None if bool((codes == 255).any()) else (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)


def multiply_rounded(x: RoundedRows, held: HeldWeight, out: Tensor | None) -> Tensor:
    """x times a weight of 8 bits with scales, [T, N] in the dtype that x was rounded from; into ``out`` if given."""
    m, (n, n_in) = len(x), held.weight.shape
    assert held.scale is not None
    check(x.data.shape == (m, n_in) and x.data.dtype == held.weight.dtype, "packed_linear", x.data, held.weight)
    out = x.data.new_empty((m, n), dtype=x.dtype) if out is None else out
    if m == 0:
        return out
    block_m, block_n, warps = rounded_blocks(m)
    rounded_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
        x.data, x.scale, held.weight, held.scale, out if held.bias is None else held.bias, out, m, n, n_in,
        held.scale.shape[1], out.stride(0), INTEGERS=held.weight.dtype == torch.int8, GROUP=held.group,
        BIAS=held.bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=INPUTS, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out


class RoundedInt8:
    """:class:`bough.device.ops.registry.RoundedApply` of INT8: integers times integers."""

    takes = torch.int8

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        assert weight.scale is not None
        values = bytes_of(weight)[:, : weight.n_in].to(torch.int16) - ZERO[Kind.INT8]
        scale = from_panels(weight.scale, weight.n_out)[:, None].contiguous().to(device)
        self.stored = HeldWeight(values.to(torch.int8).contiguous().to(device), bias, scale)

    def __call__(self, x: RoundedRows, out: Tensor | None = None) -> Tensor:
        return multiply_rounded(x, self.stored, out)


class Int8Linear:
    """:class:`bough.device.ops.registry.PackedApply` of INT8, for inputs as they are: it rounds them."""

    packed: PackedLinear | None = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        self.rounded = RoundedInt8(weight, bias, device)
        self.stored = self.rounded.stored

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.rounded(round_rows(x.contiguous(), torch.int8), out)


class UnpackedLinear:
    """:class:`bough.device.ops.registry.PackedApply` of weights that are no smaller packed."""

    packed: PackedLinear | None = None
    rounded = None
    stored = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        self._weight, self._bias = unpack(weight).to(device), bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = None if self._bias is None else self._bias.to(x.dtype)
        result = torch.nn.functional.linear(x, self._weight.to(x.dtype), bias)
        return result if out is None else out.copy_(result)


def packed_linear(
    weight: PackedWeight, bias: Tensor | None, device: torch.device
) -> GroupedLinear | Int8Linear | UnpackedLinear:
    """What multiplies with ``weight``; ValueError for ROTATED and Q4_WHOLE, whose inputs no kernel here prepares."""
    if weight.kind in (Kind.ROTATED, Kind.Q4_WHOLE):
        raise ValueError(f"{weight.kind.name} weights are for the CPU")
    if weight.kind == Kind.BF16:
        return UnpackedLinear(weight, bias, device)
    made = Int8Linear if weight.kind == Kind.INT8 else GroupedLinear
    return made(weight, bias, device)


def bytes_of(weight: PackedWeight) -> Tensor:
    """uint8 [N, bytes of an output]."""
    return from_panels(weight.weight, weight.n_out).contiguous().view(torch.uint8)


def pairs_of(weight: PackedWeight) -> tuple[Tensor, Tensor, int]:
    """Scales and offsets, float16 [N, groups], and the inputs of a group: a weight is ``q * scale + offset``."""
    kind = weight.kind
    assert weight.scale is not None
    scale = from_panels(weight.scale, weight.n_out).float()
    first, second = (scale[..., 0], scale[..., 1]) if kind in PAIRED else (scale, scale)
    if weight.sub is None:
        offset = {Kind.Q4_MIN: second, Kind.Q4_ZERO: -first * second}.get(kind, -float(ZERO.get(kind, 0)) * first)
        return first.half(), offset.half(), weight.group
    sub = from_panels(weight.sub, weight.n_out)
    if kind == Kind.Q4_K:
        wide = [part.repeat_interleave(8, dim=1)[:, : sub.shape[1]] for part in (first, second)]
        return (wide[0] * sub[..., 0]).half(), -(wide[1] * sub[..., 1]).half(), 32
    halves = sub.contiguous().view(torch.int8).flatten(1).float()
    factor = first.repeat_interleave(16, dim=1)[:, : halves.shape[1]] * halves
    return factor.half(), (-float(ZERO[kind]) * factor).half(), 16


def packed_rows(weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`."""
    panel, lane = ids.long() // PANEL, ids.long() % PANEL
    words, scale, sub = (
        None if t is None else panels(t[panel, ..., lane]) for t in (weight.weight, weight.scale, weight.sub)
    )
    assert words is not None
    return unpack(PackedWeight(weight.kind, len(ids), weight.n_in, words, scale, sub, weight.group)).to(dtype)


def fp8_linear(x: RoundedRows, weight: HeldWeight) -> Tensor:
    """See :class:`bough.device.quant.fp8.Fp8Ops` (as in Micikevicius et al. 2022)."""
    if weight.group:
        return multiply_rounded(x, weight, None)
    assert weight.scale is not None
    # Scales of rows go with bfloat16 on every GPU, with other dtypes on some; inputs of 8 bits are coarser than either.
    dtype = torch.bfloat16 if x.data.is_cuda else x.dtype
    out = torch._scaled_mm(x.data, weight.weight.T, x.scale, weight.scale.T, out_dtype=dtype).to(x.dtype)
    return out if weight.bias is None else out + weight.bias
