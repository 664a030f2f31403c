"""Linear layers with weights of 4 and 8 bits.

Weights of :class:`bough.device.ops.packed.PackedWeight` are laid out once more for the device: bytes of one output lie
together, and every kind but INT8 becomes ``q * scale + offset`` with one pair for a few inputs. Those are multiplied in
the dtype of the inputs, with the weight widened on its way to the tensor cores (W4A16, W8A16); INT8 multiplies integers
(W8A8), with one scale for each row of inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.library import PackedLinear
from bough.device.ops.packed import FOUR_BITS, PAIRED, PANEL, ZERO, Kind, PackedWeight, from_panels, panels, unpack
from bough.device.ops.rounded import RoundedRows
from bough.device.ops.triton.elementwise import round_rows
from bough.device.ops.triton.launch import check

Tensor = torch.Tensor


@triton.jit
def grouped_kernel(
    x, weight, scale, offset, bias, out, m, n, n_in, n_bytes, x_stride, out_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
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
        place = (inputs // GROUP)[:, None] * n + columns[None, :]
        factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
        added = tl.load(offset + place, mask=there, other=0.0).to(tl.float32)
        a = tl.load(line + inputs[None, :], mask=known_m & (inputs < n_in)[None, :], other=0.0)
        low = ((packed & 15) if BITS == 4 else packed).to(tl.float32) * factor + added
        total = tl.dot(a, low.to(a.dtype), total, input_precision=PRECISION)
        if BITS == 4:
            if GROUP < 32:
                place = ((inputs + 16) // GROUP)[:, None] * n + columns[None, :]
                factor = tl.load(scale + place, mask=there, other=0.0).to(tl.float32)
                added = tl.load(offset + place, mask=there, other=0.0).to(tl.float32)
            b = tl.load(line + inputs[None, :] + 16, mask=known_m & (inputs + 16 < n_in)[None, :], other=0.0)
            high = (packed >> 4).to(tl.float32) * factor + added
            total = tl.dot(b, high.to(b.dtype), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=known_m & known_n)


@triton.jit
def int8_kernel(
    x, x_scale, weight, scale, bias, out, m, n, n_in, out_stride,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known_m, known_n = (rows < m)[:, None], (columns < n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for first in range(0, n_in, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        inside = at < n_in
        a = tl.load(x + rows[:, None].to(tl.int64) * n_in + at[None, :], mask=known_m & inside[None, :], other=0)
        b = tl.load(
            weight + columns[None, :].to(tl.int64) * n_in + at[:, None], mask=inside[:, None] & known_n, other=0
        )
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    result = total.to(tl.float32) * tl.load(x_scale + rows, mask=rows < m, other=0.0)[:, None]
    result = result * tl.load(scale + columns, mask=columns < n, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
    place = rows[:, None].to(tl.int64) * out_stride + columns[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=known_m & known_n)


def grouped_blocks(m: int) -> tuple[int, int, int, int]:
    """Rows, outputs and bytes of weight that a program takes at a time, and its warps, for ``m`` rows."""
    return (16, 32, 64, 4) if m <= 16 else (64, 64, 32, 4) if m <= 64 else (128, 64, 32, 8)


def int8_blocks(m: int) -> tuple[int, int, int]:
    """Rows and outputs that a program takes at a time, and its warps, for ``m`` rows."""
    return (16, 64, 4) if m <= 16 else (64, 64, 4) if m <= 64 else (128, 128, 8)


class GroupedLinear:
    """:class:`bough.device.ops.registry.PackedApply` of a kind with scales for groups of inputs."""

    packed: PackedLinear | None = None
    rounded = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        self._bits = 4 if weight.kind in FOUR_BITS else 8
        self._bytes = bytes_of(weight).to(device)
        scale, offset, self._group = pairs_of(weight)
        self._scale, self._offset = scale.T.contiguous().to(device), offset.T.contiguous().to(device)
        self._bias, self._n_in, self._n_out = bias, weight.n_in, weight.n_out

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        m, n = len(x), self._n_out
        check(x.dim() == 2 and x.shape[1] == self._n_in and x.stride(1) == 1, "packed_linear", x, self._bytes)
        out = x.new_empty(m, n) if out is None else out
        if m == 0:
            return out
        block_m, block_n, block_b, warps = grouped_blocks(m)
        grouped_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
            x, self._bytes, self._scale, self._offset, x if self._bias is None else self._bias, out, m, n, self._n_in,
            self._bytes.shape[1], x.stride(0), out.stride(0), BITS=self._bits, GROUP=self._group,
            BIAS=self._bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_B=block_b,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out


class RoundedInt8:
    """:class:`bough.device.ops.registry.RoundedApply` of INT8: integers times integers."""

    takes = torch.int8

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        assert weight.scale is not None
        values = bytes_of(weight)[:, : weight.n_in].to(torch.int16) - ZERO[Kind.INT8]
        self._weight = values.to(torch.int8).contiguous().to(device)
        self._scale = from_panels(weight.scale, weight.n_out).contiguous().to(device)
        self._bias = bias

    def __call__(self, x: RoundedRows, out: Tensor | None = None) -> Tensor:
        m, (n, n_in) = len(x), self._weight.shape
        check(x.data.shape == (m, n_in) and x.data.dtype == torch.int8, "packed_linear", x.data, self._weight)
        out = x.data.new_empty((m, n), dtype=x.dtype) if out is None else out
        if m == 0:
            return out
        block_m, block_n, warps = int8_blocks(m)
        int8_kernel[(triton.cdiv(n, block_n), triton.cdiv(m, block_m))](
            x.data, x.scale, self._weight, self._scale, out if self._bias is None else self._bias, out, m, n, n_in,
            out.stride(0), BIAS=self._bias is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=128,
            num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out


class Int8Linear:
    """:class:`bough.device.ops.registry.PackedApply` of INT8, for inputs as they are: it rounds them."""

    packed: PackedLinear | None = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        self.rounded = RoundedInt8(weight, bias, device)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return self.rounded(round_rows(x.contiguous(), torch.int8), out)


class UnpackedLinear:
    """:class:`bough.device.ops.registry.PackedApply` of weights that are no smaller packed."""

    packed: PackedLinear | None = None
    rounded = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None, device: torch.device) -> None:
        self._weight, self._bias = unpack(weight).to(device), bias

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        bias = None if self._bias is None else self._bias.to(x.dtype)
        result = torch.nn.functional.linear(x, self._weight.to(x.dtype), bias)
        return result if out is None else out.copy_(result)


def packed_linear(
    weight: PackedWeight, bias: Tensor | None, device: torch.device
) -> GroupedLinear | Int8Linear | UnpackedLinear:
    """What multiplies with ``weight``."""
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


def fp8_linear(x: RoundedRows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """See :class:`bough.device.quant.fp8.Fp8Ops` (as in Micikevicius et al. 2022)."""
    # Scales of rows go with bfloat16 on every GPU, with other dtypes on some; inputs of 8 bits are coarser than either.
    dtype = torch.bfloat16 if x.data.is_cuda else x.dtype
    out = torch._scaled_mm(x.data, weight.T, x.scale, scale, out_dtype=dtype).to(x.dtype)
    return out if bias is None else out + bias
