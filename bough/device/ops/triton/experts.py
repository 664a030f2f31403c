"""Experts of a layer as grouped products: pairs of a token and an expert are sorted by expert, and a program multiplies
the rows of one expert with some of its outputs (as in MegaBlocks, Gale et al. 2023, without its blocks of zeros).

Which rows an expert has is known to the device alone, so the host never waits and a CUDA graph serves every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from bough.device.ops.experts import INPUTS, Clamp, HeldWeight
from bough.device.ops.triton.elementwise import round_rows
from bough.device.ops.triton.launch import check, check_floats
from bough.device.ops.triton.linear import add_product

Tensor = torch.Tensor

ROUTED = 1024
"""Pairs that a program of the sort looks at together."""


@triton.jit
def route_kernel(ids, order, starts, n, BLOCK: tl.constexpr):
    """A stable counting sort: each expert counts the pairs of those before it, then enters its own."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(ids + at, mask=at < n, other=2147483647)
        before += tl.sum((found < expert).to(tl.int32), axis=0)
    place = before
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mine = (tl.load(ids + at, mask=at < n, other=2147483647) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, axis=0) - 1, at, mask=mine > 0)
        place += tl.sum(mine, axis=0)
    tl.store(starts + expert, before)
    tl.store(starts + expert + 1, place, mask=expert + 1 == tl.num_programs(0))


@triton.jit
def finish(
    total, value, bias, shares, out, expert, columns, at, last, pair, n_out, alpha, limit,
    GATED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """The activation of gates and values, to sorted pairs; or what is weighted, to pairs."""
    known, there = columns < n_out, at < last
    if BIAS:
        added = bias + expert * (2 * n_out if GATED else n_out) + columns
        total += tl.load(added, mask=known, other=0.0).to(tl.float32)[None, :]
        if GATED:
            value += tl.load(added + n_out, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if CLAMP:
            total = tl.minimum(total, limit)
            value = tl.minimum(tl.maximum(value, -limit), limit) + 1.0
        total = total * tl.sigmoid(alpha * total) * value
        place = at.to(tl.int64)
    else:
        total *= tl.load(shares + pair, mask=there, other=0.0)[:, None]
        place = pair
    inner = there[:, None] & known[None, :]
    tl.store(out + place[:, None] * n_out + columns[None, :], total.to(out.dtype.element_ty), mask=inner)


@triton.jit
def experts_kernel(
    x, weight, bias, shares, order, starts, out, n_in, n_out, top_k, alpha, limit,
    GATED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gates and values with the activation, from tokens to sorted pairs; or the way down, from these to pairs."""
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < n_out
    n_all = 2 * n_out if GATED else n_out
    matrix = weight + expert * n_all * n_in + columns[None, :].to(tl.int64) * n_in
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        there = at < last
        pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
        line = x + (pair // top_k if GATED else at.to(tl.int64))[:, None] * n_in
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, n_in, BLOCK_K):
            inputs = begin + tl.arange(0, BLOCK_K)
            inside = inputs < n_in
            a = tl.load(line + inputs[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(matrix + inputs[:, None], mask=inside[:, None] & known[None, :], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
            if GATED:
                c = tl.load(matrix + n_out * n_in + inputs[:, None], mask=inside[:, None] & known[None, :], other=0.0)
                value = tl.dot(a, c, value, input_precision=PRECISION)
        finish(total, value, bias, shares, out, expert, columns, at, last, pair, n_out, alpha, limit,
               GATED, BIAS, CLAMP)  # fmt: skip


@triton.jit
def packed_experts_kernel(
    x, weight, scale, offset, bias, shares, order, starts, out, n_in, n_bytes, n_groups, n_out, top_k, alpha, limit,
    BITS: tl.constexpr, FLOATS: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    CLAMP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same with weights that are widened on their way (as :func:`.linear.grouped_kernel` does)."""
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < n_out
    n_all = 2 * n_out if GATED else n_out
    matrix = weight + (expert * n_all + columns)[None, :] * n_bytes
    beside = weight + (expert * n_all + n_out + columns)[None, :] * n_bytes
    factors = expert * n_groups * n_all
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        there = at < last
        pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
        line = x + (pair // top_k if GATED else at.to(tl.int64))[:, None] * n_in
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        value = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, n_bytes, BLOCK_B):
            byte = begin + tl.arange(0, BLOCK_B)
            held = (byte < n_bytes)[:, None] & known[None, :]
            inputs = byte // 16 * 32 + byte % 16 if BITS == 4 else byte
            low = tl.load(line + inputs[None, :], mask=there[:, None] & (inputs < n_in)[None, :], other=0.0)
            high = low
            if BITS == 4:
                inside = there[:, None] & (inputs + 16 < n_in)[None, :]
                high = tl.load(line + inputs[None, :] + 16, mask=inside, other=0.0)
            packed = tl.load(matrix + byte[:, None], mask=held, other=0)
            total = add_product(total, low, high, packed, scale + factors, offset + factors, inputs, n_all, columns,
                                held, BITS, FLOATS, GROUP, PRECISION)  # fmt: skip
            if GATED:
                packed = tl.load(beside + byte[:, None], mask=held, other=0)
                value = add_product(value, low, high, packed, scale + factors, offset + factors, inputs, n_all,
                                    n_out + columns, held, BITS, FLOATS, GROUP, PRECISION)  # fmt: skip
        finish(total, value, bias, shares, out, expert, columns, at, last, pair, n_out, alpha, limit,
               GATED, BIAS, CLAMP)  # fmt: skip


@triton.jit
def rounded_experts_kernel(
    x, x_scale, weight, scale, bias, shares, order, starts, out, n_in, n_blocks, n_out, top_k, alpha, limit,
    INTEGERS: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, CLAMP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same with 8 bits times 8 bits (as :func:`.linear.rounded_kernel` does)."""
    expert = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < n_out
    n_all = 2 * n_out if GATED else n_out
    matrix = weight + (expert * n_all + columns)[None, :] * n_in
    beside = weight + (expert * n_all + n_out + columns)[None, :] * n_in
    factors = scale + (expert * n_all + columns) * n_blocks
    SUM: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    KEPT: tl.constexpr = tl.float32 if GROUP else SUM
    # Tensor cores of compute capability 9.0 keep 14 bits of sums of 8-bit floats: they are added up in registers.
    MOST: tl.constexpr = 0 if INTEGERS else BLOCK_K
    last = tl.load(starts + expert + 1)
    for first in range(tl.load(starts + expert), last, BLOCK_M):
        at = first + tl.arange(0, BLOCK_M)
        there = at < last
        pair = tl.load(order + at, mask=there, other=0).to(tl.int64)
        row = pair // top_k if GATED else at.to(tl.int64)
        total = tl.zeros((BLOCK_M, BLOCK_N), KEPT)
        value = tl.zeros((BLOCK_M, BLOCK_N), KEPT)
        for begin in range(0, n_in, BLOCK_K):
            inputs = begin + tl.arange(0, BLOCK_K)
            inside = inputs < n_in
            held = inside[:, None] & known[None, :]
            a = tl.load(x + row[:, None] * n_in + inputs[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            b = tl.load(matrix + inputs[:, None], mask=held, other=0.0)
            if GROUP:
                factor = tl.load(factors + begin // GROUP, mask=known, other=0.0)
                total += tl.dot(a, b, out_dtype=SUM).to(tl.float32) * factor[None, :]
            else:
                total = tl.dot(a, b, total, max_num_imprecise_acc=MOST, out_dtype=SUM)
            if GATED:
                c = tl.load(beside + inputs[:, None], mask=held, other=0.0)
                if GROUP:
                    factor = tl.load(factors + n_out * n_blocks + begin // GROUP, mask=known, other=0.0)
                    value += tl.dot(a, c, out_dtype=SUM).to(tl.float32) * factor[None, :]
                else:
                    value = tl.dot(a, c, value, max_num_imprecise_acc=MOST, out_dtype=SUM)
        share = tl.load(x_scale + row, mask=there, other=0.0)[:, None]
        gate, other = total.to(tl.float32) * share, value.to(tl.float32) * share
        if GROUP == 0:
            gate *= tl.load(factors, mask=known, other=0.0)[None, :]
            if GATED:
                other *= tl.load(factors + n_out * n_blocks, mask=known, other=0.0)[None, :]
        finish(gate, other, bias, shares, out, expert, columns, at, last, pair, n_out, alpha, limit,
               GATED, BIAS, CLAMP)  # fmt: skip


def blocks_of(rows: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs that a program takes at a time, and its warps, for experts of about ``rows`` rows."""
    if rows <= 16:
        return 16, 64, 128, 4
    return (64, 64, 64, 4) if rows <= 64 else (128, 64 if gated else 128, 64, 8)


def packed_blocks(rows: int, gated: bool) -> tuple[int, int, int, int]:
    """The same with bytes of weight for inputs, where these are widened, which takes registers."""
    if rows <= 16:
        return 16, 32, 32 if gated else 64, 4
    return (64, 32, 32, 8 if gated else 4) if rows <= 64 else (128, 32, 32, 8)


def rounded_blocks(rows: int, gated: bool) -> tuple[int, int, int]:
    """Rows and outputs of 8 bits times 8 bits, and warps."""
    if rows <= 16:
        return 16, 64, 4
    return (64, 32, 4) if rows <= 64 else (128, 32 if gated else 64, 8)


class GroupedExperts:
    """:data:`bough.device.ops.experts.ExpertsOp` of weights that are all held alike."""

    def __init__(
        self, gate_up: Sequence[HeldWeight], down: Sequence[HeldWeight], sizes: tuple[int, int], clamp: Clamp | None
    ) -> None:
        """Moves the weights of all experts together, where they stay: whoever holds one holds a part of the whole."""
        self._n, self._sizes, self._clamp = len(gate_up), sizes, clamp
        self._gate_up, self._down = _together(gate_up), _together(down)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        check_floats("experts", x)
        (n, dim), (hidden, inner) = x.shape, self._sizes
        check(
            dim == hidden and ids.shape == weights.shape == (n, ids.shape[-1])
            and (x.dtype == self._gate_up.weight.dtype or self._gate_up.scale is not None)
            and (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
            and ids.is_contiguous() and weights.is_contiguous(),
            "experts", x, ids, weights,
        )  # fmt: skip
        if not n:
            return torch.empty_like(x)
        pairs = ids.numel()
        order, starts = ids.new_empty(pairs), ids.new_empty(self._n + 1)
        route_kernel[(self._n,)](ids, order, starts, pairs, BLOCK=ROUTED, num_warps=4)
        middle = x.new_empty(pairs, inner)
        products = x.new_empty((pairs, hidden), dtype=torch.float32)
        self._multiply(x, self._gate_up, weights, order, starts, middle, gated=True)
        self._multiply(middle, self._down, weights, order, starts, products, gated=False)
        return products.view(n, -1, hidden).sum(1).to(x.dtype)

    def _multiply(
        self, x: Tensor, held: HeldWeight, shares: Tensor, order: Tensor, starts: Tensor, out: Tensor, gated: bool
    ) -> None:
        n_in, n_out, clamp, rows = x.shape[1], out.shape[1], self._clamp, len(order) // self._n
        bias = x if held.bias is None else held.bias
        behind = (shares.shape[1], clamp.alpha if clamp else 1.0, clamp.limit if clamp else 0.0)
        how = {"GATED": gated, "BIAS": held.bias is not None, "CLAMP": clamp is not None, "num_stages": 3}
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        if held.scale is None:
            m, n, k, warps = blocks_of(rows, gated)
            experts_kernel[(triton.cdiv(n_out, n), self._n)](
                x, held.weight, bias, shares, order, starts, out, n_in, n_out, *behind,
                BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, PRECISION=precision, num_warps=warps, **how,
            )  # fmt: skip
        elif held.offset is not None:
            m, n, b, warps = packed_blocks(rows, gated)
            packed_experts_kernel[(triton.cdiv(n_out, n), self._n)](
                x, held.weight, held.scale, held.offset, bias, shares, order, starts, out, n_in, held.weight.shape[2],
                held.scale.shape[1], n_out, *behind, BITS=8 if held.form == "8" else 4, FLOATS=held.form == "fp4",
                GROUP=held.group, BLOCK_M=m, BLOCK_N=n, BLOCK_B=b, PRECISION=precision, num_warps=warps, **how,
            )  # fmt: skip
        else:
            m, n, warps = rounded_blocks(rows, gated)
            rounded = round_rows(x, held.weight.dtype)
            rounded_experts_kernel[(triton.cdiv(n_out, n), self._n)](
                rounded.data, rounded.scale, held.weight, held.scale, bias, shares, order, starts, out, n_in,
                held.scale.shape[2], n_out, *behind, INTEGERS=held.weight.dtype == torch.int8, GROUP=held.group,
                BLOCK_M=m, BLOCK_N=n, BLOCK_K=INPUTS, num_warps=warps, **how,
            )  # fmt: skip


def _together(parts: Sequence[HeldWeight]) -> HeldWeight:
    """All of them, one behind the other: one more dimension before those of a part."""

    def stack(found: list[Tensor | None]) -> Tensor | None:
        each = [part for part in found if part is not None]
        if len(each) < len(found):
            return None
        whole = torch.stack(each)
        for part, one in zip(whole, each):
            one.set_(part)
        return whole

    weight = stack([part.weight for part in parts])
    assert weight is not None
    bias = stack([part.bias for part in parts])
    scale, offset = stack([part.scale for part in parts]), stack([part.offset for part in parts])
    return replace(parts[0], weight=weight, bias=bias, scale=scale, offset=offset)
