"""Attention whose values are its keys: latents that all heads share (absorbed MLA, DeepSeek-AI 2024, section 2.1.2).

A cell is read once, for the scores and for what they weigh. The work is planned as that of :mod:`.attention`, whose
kernel merges partial results, too. A cell of D numbers is taken in two parts: the largest power of two below D, which
the latent is, behind what is left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.attention.work import Sizes, Tiles
from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.heads import Scoring
from bough.device.ops.triton.launch import check, check_floats, next_power, resident
from bough.device.ops.triton.merge import merge
from bough.device.ops.triton.rope import parts

Tensor = torch.Tensor

KEYS = 32
"""Cells that a program holds at a time."""

QUERIES = 32
"""Queries that it holds at most, as registers allow: heads of one token or, where there are few, of several."""

STAGES = 2
"""Of the pipeline of loads."""


@triton.jit
def latent_kernel(
    q, cells, cell_scale, page_table, work, out, partials, stats, table_stride, scale,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, REST: tl.constexpr, BLOCK_R: tl.constexpr, LATENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LARGE: tl.constexpr, QUANTIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    DIM: tl.constexpr = REST + LATENT
    PARTS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    n_items = tl.load(work + LARGE)
    items = work + tl.load(work + 3 + LARGE)
    order = work + tl.load(work + 5)
    positions = work + tl.load(work + 6)
    line = tl.arange(0, BLOCK_M)
    r = tl.arange(0, BLOCK_R)
    d = REST + tl.arange(0, LATENT)
    for index in range(tl.program_id(0), n_items * PARTS, tl.num_programs(0)):
        item = items + index // PARTS * 6
        head = index % PARTS * BLOCK_H + line % BLOCK_H
        table = page_table + tl.load(item).to(tl.int64) * table_stride
        at = tl.load(item + 1) + line // BLOCK_H
        held = (line // BLOCK_H < tl.load(item + 2)) & (head < HEADS)
        first, last = tl.load(item + 3), tl.load(item + 4)
        partial = tl.load(item + 5)
        token = tl.load(order + at, mask=held, other=0).to(tl.int64)
        position = tl.load(positions + at, mask=held, other=0)
        place = (token * HEADS + head)[:, None] * DIM
        own = held[:, None]
        rest = own & (r < REST)[None, :]
        q_rest = tl.load(q + place + r[None, :], mask=rest, other=0.0)
        q_latent = tl.load(q + place + d[None, :], mask=own, other=0.0)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed_rest = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        mixed_latent = tl.zeros((BLOCK_M, LATENT), tl.float32)
        for begin in range(first, last, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            there = keys < last
            cell = tl.load(table + keys, mask=there, other=0).to(tl.int64)
            from_cell = cells + cell[:, None] * DIM
            k_rest = tl.load(from_cell + r[None, :], mask=there[:, None] & (r < REST)[None, :], other=0.0)
            k_latent = tl.load(from_cell + d[None, :], mask=there[:, None], other=0.0)
            k_rest, k_latent = k_rest.to(q_rest.dtype), k_latent.to(q_rest.dtype)
            scores = tl.dot(q_latent, tl.trans(k_latent), input_precision=PRECISION)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION) * scale
            if QUANTIZED:
                scores *= tl.load(cell_scale + cell, mask=there, other=0.0)[None, :]
            seen = there[None, :] & (keys[None, :] <= position[:, None])
            scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            # A query that has seen nothing yet: any finite number gives weights of 0.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            decay = tl.exp2(top - level)
            total = total * decay + tl.sum(weights, axis=1)
            if QUANTIZED:
                weights *= tl.load(cell_scale + cell, mask=there, other=0.0)[None, :]
            weights = weights.to(q_rest.dtype)
            mixed_rest = tl.dot(weights, k_rest, mixed_rest * decay[:, None], input_precision=PRECISION)
            mixed_latent = tl.dot(weights, k_latent, mixed_latent * decay[:, None], input_precision=PRECISION)
            top = higher
        if partial < 0:
            whole = tl.where(held, total, 1.0)[:, None]
            tl.store(out + place + r[None, :], (mixed_rest / whole).to(out.dtype.element_ty), mask=rest)
            tl.store(out + place + d[None, :], (mixed_latent / whole).to(out.dtype.element_ty), mask=own)
        else:
            where = (partial + line // BLOCK_H).to(tl.int64) * HEADS + head
            tl.store(partials + where[:, None] * DIM + r[None, :], mixed_rest, mask=rest)
            tl.store(partials + where[:, None] * DIM + d[None, :], mixed_latent, mask=own)
            tl.store(stats + 2 * where, top, mask=held)
            tl.store(stats + 2 * where + 1, total, mask=held)


def blocks_of(n_heads: int, large: bool) -> tuple[int, int]:
    """Queries that a program holds, and how many of them are heads of one token."""
    heads = min(QUERIES, max(16, next_power(n_heads)))
    return (QUERIES if large else heads), heads


def warps_of(queries: int) -> int:
    """Of a program that holds so many queries."""
    return 8 if queries > 16 else 4


def tiles_of(n_heads: int) -> Tiles:
    """Tokens that the tiles hold."""
    small, large = (m // heads for m, heads in (blocks_of(n_heads, kind) for kind in (False, True)))
    return Tiles(small, large)


def attend_latent(q: Tensor, cells: Cells, page_table: Tensor, work: Tensor, sizes: Sizes, scoring: Scoring) -> Tensor:
    """Attention of q [T, H, D] to cells [N, 1, D], the keys and the values of all heads: [T, H, D].

    ``work`` is planned with :func:`tiles_of`; everything else as in :func:`bough.device.ops.triton.attention.attend`.
    ValueError for a layer with a window, a soft cap or sinks.
    """
    check_floats("paged_attention", q)
    n_heads, dim = q.shape[1:]
    data, cell_scale = parts(cells)
    check(
        cells.shape[1:] == (1, dim) and not scoring.window and not scoring.softcap and scoring.sinks is None,
        "paged_attention", q, data,
    )  # fmt: skip
    latent = next_power(dim // 2 + 1)
    out = torch.empty_like(q)
    partials = q.new_empty((sizes.partials, n_heads, dim), dtype=torch.float32)
    stats = q.new_empty((sizes.partials, n_heads, 2), dtype=torch.float32)
    for large, n_items in ((False, sizes.small), (True, sizes.large)):
        if n_items == 0:
            continue
        queries, heads = blocks_of(n_heads, large)
        n_programs = n_items * triton.cdiv(n_heads, heads)
        latent_kernel[(min(n_programs, resident(q.device)),)](
            q, data, cell_scale, page_table, work, out, partials, stats, page_table.stride(0), scoring.scale,
            HEADS=n_heads, BLOCK_H=heads, REST=dim - latent, BLOCK_R=max(16, next_power(dim - latent)), LATENT=latent,
            BLOCK_M=queries, BLOCK_N=KEYS, LARGE=int(large), QUANTIZED=isinstance(cells, QuantizedCells),
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=warps_of(queries), num_stages=STAGES,
        )  # fmt: skip
    merge(work, partials, stats, None, out, sizes)
    return out
