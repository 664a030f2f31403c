"""Attention over paged KV for rows of any kind in one batch.

Decode rows, chunks of prompts and prefixes that rows share are items of the same work list
(:mod:`bough.device.attention.work`); programs take one after the other, so the grid depends on the device, not on the
lengths, and a CUDA graph serves every step. Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) with partial
results merged by their sums (split-KV: Dao et al. 2023; shared prefixes: Juravsky et al. 2024, Ye et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bough.device.attention.work import Sizes, Tiles
from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.heads import Scoring
from bough.device.ops.triton import latent
from bough.device.ops.triton.launch import check, check_floats, next_power, resident
from bough.device.ops.triton.merge import merge
from bough.device.ops.triton.rope import parts

Tensor = torch.Tensor


@triton.jit
def before_seen(position, window, CHUNKED: tl.constexpr):
    """The last position that a query at ``position`` does not see; negative where there is none."""
    if CHUNKED:
        return position // window * window - 1
    return position - window


@triton.jit
def attend_kernel(
    q, k, v, k_scale, v_scale, page_table, work, sinks, out, partials, stats, table_stride, scale, softcap, window,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LARGE: tl.constexpr, QUANTIZED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n_items = tl.load(work + LARGE)
    items = work + tl.load(work + 3 + LARGE)
    order = work + tl.load(work + 5)
    positions = work + tl.load(work + 6)
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    for index in range(tl.program_id(0), n_items * KV_HEADS, tl.num_programs(0)):
        item = items + index // KV_HEADS * 6
        head = index % KV_HEADS
        table = page_table + tl.load(item).to(tl.int64) * table_stride
        count = tl.load(item + 2)
        # Nothing is added, which the compiler must not know: it would keep what follows from ``line`` for all items.
        line = tl.arange(0, BLOCK_M) + tl.minimum(count, 0)
        at = tl.load(item + 1) + line // GROUP
        held = line // GROUP < count
        first, last = tl.load(item + 3), tl.load(item + 4)
        partial = tl.load(item + 5)
        if WINDOW:
            # What the first token does not see, no later one does; where its KV lay there may be somebody else's.
            unseen = before_seen(tl.load(positions + tl.load(item + 1)), window, CHUNKED)
            first = tl.maximum(first, (unseen + 1) // BLOCK_N * BLOCK_N)
        token = tl.load(order + at, mask=held, other=0).to(tl.int64)
        position = tl.load(positions + at, mask=held, other=0)
        own = head * GROUP + line % GROUP
        place = (token * KV_HEADS * GROUP + own)[:, None] * DIM + d[None, :]
        queries = tl.load(q + place, mask=held[:, None] & inside[None, :], other=0.0)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for begin in range(first, last, BLOCK_N):
            keys = begin + tl.arange(0, BLOCK_N)
            there = keys < last
            if WINDOW:
                there = there & (keys > unseen)
            cell = tl.load(table + keys, mask=there, other=0).to(tl.int64) * KV_HEADS + head
            if BLOCK_D == DIM:
                ks = tl.load(k + cell[None, :] * DIM + d[:, None], mask=there[None, :], other=0.0)
                vs = tl.load(v + cell[:, None] * DIM + d[None, :], mask=there[:, None], other=0.0)
            else:
                ks = tl.load(k + cell[None, :] * DIM + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
                vs = tl.load(v + cell[:, None] * DIM + d[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            scores = tl.dot(queries, ks.to(queries.dtype), input_precision=PRECISION) * scale
            if QUANTIZED:
                scores *= tl.load(k_scale + cell, mask=there, other=0.0)[None, :]
            if SOFTCAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            seen = there[None, :] & (keys[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (keys[None, :] > before_seen(position, window, CHUNKED)[:, None])
            # Powers of two are what the hardware has: log2(e) makes them powers of e.
            scores = tl.where(seen, scores * 1.4426950408889634, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, axis=1))
            # A query that has seen nothing yet: any finite number gives weights of 0.
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            decay = tl.exp2(top - level)
            total = total * decay + tl.sum(weights, axis=1)
            if QUANTIZED:
                weights *= tl.load(v_scale + cell, mask=there, other=0.0)[None, :]
            result = result * decay[:, None]
            result = tl.dot(weights.to(queries.dtype), vs.to(queries.dtype), result, input_precision=PRECISION)
            top = higher
        if partial < 0:
            if SINKS:
                sink = tl.load(sinks + own).to(tl.float32) * 1.4426950408889634
                higher = tl.maximum(top, sink)
                result = result * tl.exp2(top - higher)[:, None]
                total = total * tl.exp2(top - higher) + tl.exp2(sink - higher)
            mixed = result / tl.where(held, total, 1.0)[:, None]
            tl.store(out + place, mixed.to(out.dtype.element_ty), mask=held[:, None] & inside[None, :])
        else:
            where = (partial + line // GROUP).to(tl.int64) * KV_HEADS * GROUP + own
            tl.store(partials + where[:, None] * DIM + d[None, :], result, mask=held[:, None] & inside[None, :])
            tl.store(stats + 2 * where, top, mask=held)
            tl.store(stats + 2 * where + 1, total, mask=held)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Constants of one of the two forms of the kernel: queries, keys, warps, stages of the pipeline of loads."""

    m: int
    n: int
    warps: int
    stages: int


def blocks_of(group: int, dim: int, dtype: torch.dtype, large: bool, cells: torch.dtype) -> Blocks:
    """The constants for ``group`` query heads to a key-value head of ``dim`` numbers; ``m`` does not depend on
    ``cells``, the dtype of the KV.

    Small tiles wait for memory: two blocks of keys are under way, which takes five stages, as their addresses are
    loaded first. Large ones multiply: as many queries as registers hold, beside what cells are widened with.
    """
    wide, exact = next_power(dim) * dtype.itemsize, dtype == torch.float32
    if not large:
        keys, stages = (64, 5) if wide <= 256 else (32, 3) if wide <= 512 else (16, 2)
        return Blocks(max(16, next_power(group)), keys, 4, stages)
    most = 32 if wide > 512 else 64 if wide > 256 or exact else 128
    few = wide > 256 or exact or cells == torch.int8
    keys = 16 if wide > 512 else 32 if few else 64
    return Blocks(max(most, next_power(group)), keys, 8, 2 if wide > 512 or (few and cells.itemsize == 1) else 3)


def tiles_of(n_heads: int, n_kv_heads: int, dim: int, dtype: torch.dtype) -> Tiles:
    """Tokens that the tiles of a model with these heads hold."""
    group = n_heads // n_kv_heads
    small, large = (blocks_of(group, dim, dtype, kind, dtype).m // group for kind in (False, True))
    return Tiles(small, large)


def tiles_for(q: Tensor, k_cache: Cells, v_cache: Cells) -> Tiles:
    """The tiles that attention of q [T, H, D] to these cells is planned with."""
    if v_cache is k_cache:
        return latent.tiles_of(q.shape[1])
    return tiles_of(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype)


def attend(
    q: Tensor,
    k_cache: Cells,
    v_cache: Cells,
    page_table: Tensor,
    work: Tensor,
    sizes: Sizes,
    scoring: Scoring,
) -> Tensor:
    """Attention of q [T, H, D] as ``work`` says, planned with :func:`tiles_for` and the window: [T, H, D].

    Values that are the keys themselves, the same object, are read once (:mod:`.latent`).

    Args:
        q, k_cache, v_cache, page_table, scoring: as in :meth:`bough.device.ops.registry.Ops.paged_attention`.
        work: int32, the array of :class:`bough.device.attention.work.Work`, on the device.
        sizes: of the work, or bounds of it.
    """
    if v_cache is k_cache:
        return latent.attend_latent(q, k_cache, page_table, work, sizes, scoring)
    check_floats("paged_attention", q)
    n_heads, dim = q.shape[1:]
    n_kv_heads = k_cache.shape[1]
    check(
        k_cache.shape[1:] == v_cache.shape[1:] == (n_kv_heads, dim) and n_heads % n_kv_heads == 0,
        "paged_attention", q, *parts(k_cache),
    )  # fmt: skip
    out = torch.empty_like(q)
    partials = q.new_empty((sizes.partials, n_heads, dim), dtype=torch.float32)
    stats = q.new_empty((sizes.partials, n_heads, 2), dtype=torch.float32)
    (k, k_scale), (v, v_scale) = parts(k_cache), parts(v_cache)
    sinks = q if scoring.sinks is None else scoring.sinks
    group, block_d = n_heads // n_kv_heads, max(16, next_power(dim))
    for large, n_items in ((False, sizes.small), (True, sizes.large)):
        if n_items == 0:
            continue
        blocks = blocks_of(group, dim, q.dtype, large, k.dtype)
        attend_kernel[(min(n_items * n_kv_heads, resident(q.device)),)](
            q, k, v, k_scale, v_scale, page_table, work, sinks, out, partials, stats,
            page_table.stride(0), scoring.scale, scoring.softcap, scoring.window,
            KV_HEADS=n_kv_heads, GROUP=group, DIM=dim, BLOCK_D=block_d, BLOCK_M=blocks.m, BLOCK_N=blocks.n,
            LARGE=int(large), QUANTIZED=isinstance(k_cache, QuantizedCells), SOFTCAP=scoring.softcap != 0.0,
            WINDOW=scoring.window > 0, CHUNKED=scoring.chunked, SINKS=scoring.sinks is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    merge(work, partials, stats, scoring.sinks, out, sizes)
    return out
