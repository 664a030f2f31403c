"""Partial results of attention, merged by their sums in the order of their keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.attention.work import Sizes
from bough.device.ops.triton.launch import next_power

Tensor = torch.Tensor

HEADS = 8
"""Heads that a program merges."""


@triton.jit
def merge_kernel(
    work, partials, stats, sinks, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0)
    if index < tl.load(work + 2):
        token = tl.load(work + tl.load(work + 7) + index).to(tl.int64)
        starts = work + tl.load(work + 8) + index
        found = work + tl.load(work + 9)
        heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
        known = heads < HEADS
        d = tl.arange(0, BLOCK_D)[None, :]
        inside = known[:, None] & (d < DIM)
        top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        result = tl.zeros((BLOCK_H, BLOCK_D), tl.float32)
        if SINKS:
            top = tl.load(sinks + heads, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
            total += 1.0
        for at in range(tl.load(starts), tl.load(starts + 1)):
            where = tl.load(found + at).to(tl.int64) * HEADS + heads
            part_top = tl.load(stats + 2 * where, mask=known, other=0.0)
            part_total = tl.load(stats + 2 * where + 1, mask=known, other=0.0)
            part = tl.load(partials + where[:, None] * DIM + d, mask=inside, other=0.0)
            higher = tl.maximum(top, part_top)
            # A window may leave a query nothing to see in a split.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            before, here = tl.exp2(top - level), tl.exp2(part_top - level)
            total = total * before + part_total * here
            result = result * before[:, None] + part * here[:, None]
            top = higher
        place = (token * HEADS + heads)[:, None] * DIM + d
        mixed = result / tl.where(known, total, 1.0)[:, None]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


def merge(work: Tensor, partials: Tensor, stats: Tensor, sinks: Tensor | None, out: Tensor, sizes: Sizes) -> None:
    """Into ``out`` [T, H, D], what ``work`` says of partials [n, H, D] and their stats [n, H, 2], both float32."""
    n_heads, dim = out.shape[1:]
    if sizes.merged:
        merge_kernel[(sizes.merged, triton.cdiv(n_heads, HEADS))](
            work, partials, stats, out if sinks is None else sinks, out,
            HEADS=n_heads, DIM=dim, BLOCK_D=max(16, next_power(dim)), BLOCK_H=HEADS, SINKS=sinks is not None,
            num_warps=4,
        )  # fmt: skip
