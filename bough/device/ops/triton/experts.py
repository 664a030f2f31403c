"""Experts of a layer as grouped products: pairs of a token and an expert are sorted by expert, and a program multiplies
the rows of one expert with some of its outputs (as in MegaBlocks, Gale et al. 2023, without its blocks of zeros).

Which rows an expert has is known to the device alone, so the host never waits and a CUDA graph serves every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from bough.device.ops.experts import Clamp, Dense
from bough.device.ops.triton.launch import check, check_floats

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
        if BIAS:
            added = bias + expert * n_all + columns
            total += tl.load(added, mask=known, other=0.0).to(tl.float32)[None, :]
            if GATED:
                value += tl.load(added + n_out, mask=known, other=0.0).to(tl.float32)[None, :]
        inner = there[:, None] & known[None, :]
        if GATED:
            if CLAMP:
                total = tl.minimum(total, limit)
                value = tl.minimum(tl.maximum(value, -limit), limit) + 1.0
            total = total * tl.sigmoid(alpha * total) * value
            place = at.to(tl.int64)
        else:
            total *= tl.load(shares + pair, mask=there, other=0.0)[:, None]
            place = pair
        tl.store(out + place[:, None] * n_out + columns[None, :], total.to(out.dtype.element_ty), mask=inner)


def blocks_of(rows: int, gated: bool) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs that a program takes at a time, and its warps, for experts of about ``rows`` rows."""
    if rows <= 16:
        return 16, 64, 128, 4
    return (64, 64, 64, 4) if rows <= 64 else (128, 64 if gated else 128, 64, 8)


class GroupedExperts:
    """:data:`bough.device.ops.experts.ExpertsOp` of weights in the dtype of the inputs."""

    def __init__(
        self, gate_up: Sequence[Dense], down: Sequence[Dense], sizes: tuple[int, int], clamp: Clamp | None
    ) -> None:
        """Moves the weights of all experts together, where they stay: whoever holds one holds a part of the whole."""
        self._n, self._sizes, self._clamp = len(gate_up), sizes, clamp
        self._gate_up, self._down = (_together([part.weight for part in parts]) for parts in (gate_up, down))
        self._gate_up_bias, self._down_bias = (_biases(parts) for parts in (gate_up, down))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        check_floats("experts", x)
        (n, dim), (hidden, inner) = x.shape, self._sizes
        check(
            dim == hidden and ids.shape == weights.shape == (n, ids.shape[-1]) and x.dtype == self._gate_up.dtype
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
        self._multiply(x, self._gate_up, self._gate_up_bias, weights, order, starts, middle, gated=True)
        self._multiply(middle, self._down, self._down_bias, weights, order, starts, products, gated=False)
        return products.view(n, -1, hidden).sum(1).to(x.dtype)

    def _multiply(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shares: Tensor, order: Tensor, starts: Tensor,
        out: Tensor, gated: bool,
    ) -> None:  # fmt: skip
        n_out, clamp = out.shape[1], self._clamp
        block_m, block_n, block_k, warps = blocks_of(len(order) // self._n, gated)
        experts_kernel[(triton.cdiv(n_out, block_n), self._n)](
            x, weight, x if bias is None else bias, shares, order, starts, out, x.shape[1], n_out, shares.shape[1],
            clamp.alpha if clamp else 1.0, clamp.limit if clamp else 0.0, GATED=gated, BIAS=bias is not None,
            CLAMP=clamp is not None, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=3,
        )  # fmt: skip


def _together(weights: Sequence[Tensor]) -> Tensor:
    whole = torch.stack(list(weights))
    for part, weight in zip(whole, weights):
        weight.set_(part)
    return whole


def _biases(parts: Sequence[Dense]) -> Tensor | None:
    found = [part.bias for part in parts if part.bias is not None]
    return torch.stack(found) if len(found) == len(parts) else None
