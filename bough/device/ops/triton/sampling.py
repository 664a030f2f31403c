"""Sampling without a sort: one program per row, which reads its logits a few times out of the device's cache.

What top-k and top-p keep are the tokens above a threshold, and some of those on it, by rising id. Distances from the
largest logit are not negative, so their bits order as the numbers do, and the threshold is found by bisection of the
bits (as in radix selection), until one token is left between the bounds. Comparisons and parameters are those of
:mod:`bough.device.ops.sampling`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.device.ops.sampling import Draws, TokenLogprobs, uniforms
from bough.device.ops.triton.launch import check, check_floats
from bough.device.platform.copies import to_device

Tensor = torch.Tensor

COLUMNS = 4096
"""Logits of a row that a program holds at a time."""

DRAWN = 2048
"""The same for draws, which keep more numbers of each."""

PENALISED = 512
"""Tokens that occurred which a program looks at."""

WIDEST = 1 << 30


@triton.jit
def argmax_kernel(logits, out, vocab, BLOCK: tl.constexpr):
    row = logits + tl.program_id(0).to(tl.int64) * vocab
    best = float("-inf")
    index = 0
    broken = 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        broken += tl.sum((values != values).to(tl.int32), axis=0)
        values = tl.where(values != values, float("-inf"), values)
        top = tl.max(values, axis=0)
        where = tl.min(tl.where(values == top, at, 2147483647), axis=0)
        index = tl.where(top > best, where, index)
        best = tl.maximum(best, top)
    bad = (broken > 0) | (best == float("inf")) | (best == float("-inf"))
    tl.store(out + tl.program_id(0), tl.where(bad, -1, index).to(tl.int64))


@triton.jit
def apply_bitmask_kernel(logits, masks, rows, vocab, words, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(masks + tl.program_id(0).to(tl.int64) * words + at // 32, mask=at < vocab, other=-1)
    allowed = (word >> (at % 32)) & 1
    forbidden = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * vocab + at, forbidden, mask=(at < vocab) & (allowed == 0))


@triton.jit
def penalise_kernel(logits, entries, n, vocab, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    place = tl.load(entries + at, mask=inside, other=0).to(tl.int64) * vocab
    place += tl.load(entries + n + at, mask=inside, other=0)
    factor = tl.load(entries + 2 * n + at, mask=inside, other=1).to(tl.float32, bitcast=True)
    subtracted = tl.load(entries + 3 * n + at, mask=inside, other=0).to(tl.float32, bitcast=True)
    value = tl.load(logits + place, mask=inside, other=0.0)
    value = tl.where(value > 0.0, tl.div_rn(value, factor), value * factor)
    tl.store(logits + place, value - subtracted, mask=inside)


@triton.jit
def _distances(row, at, vocab, largest, temperature):
    """``-z`` of :mod:`bough.device.ops.sampling`, never the negative zero; infinite where there is no token."""
    values = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    return tl.abs(tl.div_rn(largest - values, temperature))


@triton.jit
def _kept_weights(row, at, vocab, largest, temperature, edge, ties, furthest, on_edge):
    """Weights of the tokens ``at``, 0 of those that are not kept, and how many lie on the edge up to their end."""
    distance = _distances(row, at, vocab, largest, temperature)
    bits = distance.to(tl.int32, bitcast=True)
    level = ((bits == edge) & (at < vocab)).to(tl.int32)
    rank = on_edge + tl.cumsum(level, axis=0)
    kept = (bits < edge) | ((bits == edge) & (rank <= ties))
    kept = kept & (at < vocab) & (distance.to(tl.float64) <= furthest)
    return tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), on_edge + tl.sum(level, axis=0)


@triton.jit
def _threshold(row, vocab, largest, temperature, count, weight, above, BLOCK: tl.constexpr):
    """The smallest bits of a distance for which the tokens up to it are at least ``count``, or weigh at least
    ``weight``, whichever comes first; then number and weight of the tokens before it. ``above`` is a bound of it."""
    low = -1
    low_count = 0
    low_weight = tl.zeros((), tl.float64)
    high = above
    high_count = vocab
    while (high - low > 1) & (high_count - low_count > 1):
        middle = low + (high - low) // 2
        n = 0
        sum = tl.zeros((), tl.float64)
        for first in range(0, vocab, BLOCK):
            distance = _distances(row, first + tl.arange(0, BLOCK), vocab, largest, temperature)
            kept = (distance.to(tl.int32, bitcast=True) <= middle) & (first + tl.arange(0, BLOCK) < vocab)
            n += tl.sum(kept.to(tl.int32), axis=0)
            sum += tl.sum(tl.where(kept, tl.exp(-distance), 0.0).to(tl.float64), axis=0)
        reached = (n >= count) | (sum >= weight)
        high = tl.where(reached, middle, high)
        high_count = tl.where(reached, n, high_count)
        low = tl.where(reached, low, middle)
        low_count = tl.where(reached, low_count, n)
        low_weight = tl.where(reached, low_weight, sum)
    # One token, or several of one distance, lie between: the threshold is the least distance above ``low``.
    found = high
    if high - low > 1:
        for first in range(0, vocab, BLOCK):
            distance = _distances(row, first + tl.arange(0, BLOCK), vocab, largest, temperature)
            bits = distance.to(tl.int32, bitcast=True)
            found = tl.minimum(found, tl.min(tl.where(bits > low, bits, high), axis=0))
    return found, low_count, low_weight


@triton.jit
def sample_kernel(logits, best, parameters, out, n, vocab, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * vocab
    chosen = tl.load(best + index)
    if chosen < 0:
        tl.store(out + index, chosen)
    else:
        largest = tl.load(row + chosen).to(tl.float32)
        temperature = tl.load(parameters + index).to(tl.float32)
        top_k = tl.load(parameters + n + index).to(tl.int32)
        top_p = tl.load(parameters + 2 * n + index)
        furthest = -tl.load(parameters + 3 * n + index)
        u = tl.load(parameters + 4 * n + index)
        # Everything up to ``edge`` is kept, of what lies on it the first ``ties`` by id.
        edge = 2139095040
        ties = vocab
        if top_k < vocab:
            edge, before, weight = _threshold(row, vocab, largest, temperature, top_k, float("inf"), 2139095040, BLOCK)
            ties = top_k - before
        if top_p < 1.0:
            whole = tl.zeros((), tl.float64)
            on_edge = 0
            for first in range(0, vocab, BLOCK):
                at = first + tl.arange(0, BLOCK)
                weights, on_edge = _kept_weights(
                    row, at, vocab, largest, temperature, edge, ties, float("inf"), on_edge
                )
                whole += tl.sum(weights, axis=0)
            asked = top_p * whole
            reached, before, weight = _threshold(row, vocab, largest, temperature, vocab, asked, edge, BLOCK)
            if reached < edge:
                ties = vocab
            single = tl.exp(-tl.cast(reached, tl.float32, bitcast=True)).to(tl.float64)
            # How many of one weight it takes to reach what is asked for; at least one.
            missing = tl.ceil(tl.minimum((asked - weight) / tl.maximum(single, 1e-300), 2147483000.0)).to(tl.int32)
            ties = tl.minimum(ties, tl.maximum(missing, 1))
            edge = reached
        total = tl.zeros((), tl.float64)
        on_edge = 0
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            weights, on_edge = _kept_weights(row, at, vocab, largest, temperature, edge, ties, furthest, on_edge)
            total += tl.sum(weights, axis=0)
        target = u * total
        sum = tl.zeros((), tl.float64)
        on_edge = 0
        token = 2147483647
        last = 0
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            weights, on_edge = _kept_weights(row, at, vocab, largest, temperature, edge, ties, furthest, on_edge)
            ends = sum + tl.cumsum(weights, axis=0)
            passed = (ends > target) & (weights > 0.0)
            token = tl.minimum(token, tl.min(tl.where(passed, at, 2147483647), axis=0))
            last = tl.maximum(last, tl.max(tl.where(weights > 0.0, at, 0), axis=0))
            sum += tl.sum(weights, axis=0)
        # Rounding may put the target at the very end; it is then the last token that has any weight.
        tl.store(out + index, tl.minimum(token, last).to(tl.int64))


@triton.jit
def logprobs_kernel(
    logits, tokens, asked, chosen, ranks, top_ids, top, asked_out, vocab, n_top, n_asked, BLOCK: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    token = tl.load(tokens + index).to(tl.int32)
    own = tl.load(row + token).to(tl.float32)
    largest = float("-inf")
    ahead = 0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(values, axis=0))
        before = (values > own) | ((values == own) & (at < token))
        ahead += tl.sum((before & (at < vocab)).to(tl.int32), axis=0)
    sum = 0.0
    for first in range(0, vocab, BLOCK):
        at = first + tl.arange(0, BLOCK)
        values = tl.load(row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        sum += tl.sum(tl.exp(values - largest), axis=0)
    level = largest + tl.log(sum)
    tl.store(chosen + index, own - level)
    tl.store(ranks + index, ahead + 1)
    for place in range(n_asked):
        value = tl.load(row + tl.load(asked + place)).to(tl.float32)
        tl.store(asked_out + index * n_asked + place, value - level)
    # The next one of the order is the largest of those behind the one before.
    limit = float("inf")
    limit_id = -1
    for place in range(n_top):
        best = float("-inf")
        best_id = -1
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            values = tl.load(row + at, mask=at < vocab, other=float("nan")).to(tl.float32)
            behind = (values < limit) | ((values == limit) & (at > limit_id))
            here = tl.max(tl.where(behind, values, float("-inf")), axis=0)
            where = tl.min(tl.where(behind & (values == here), at, 2147483647), axis=0)
            better = (where < 2147483647) & ((here > best) | (best_id < 0))
            best_id = tl.where(better, where, best_id)
            best = tl.where(better, here, best)
        tl.store(top_ids + index * n_top + place, best_id)
        tl.store(top + index * n_top + place, best - level)
        limit = tl.where(best_id < 0, float("-inf"), best)
        limit_id = tl.where(best_id < 0, vocab, best_id)


def argmax(logits: Tensor) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("argmax", logits)
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        argmax_kernel[(len(logits),)](logits, out, logits.shape[1], BLOCK=COLUMNS, num_warps=8)
    return out


def apply_bitmask(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """See :class:`bough.device.ops.registry.Ops`."""
    vocab = logits.shape[1]
    words = -(-vocab // 32)
    check(masks.shape == (len(rows), words) and rows.dim() == 1, "apply_bitmask", logits, masks, rows)
    check(masks.dtype == torch.int32 and masks.is_contiguous() and logits.is_contiguous(), "apply_bitmask", masks)
    if len(rows):
        apply_bitmask_kernel[(len(rows), triton.cdiv(vocab, COLUMNS))](
            logits, masks, rows, vocab, words, BLOCK=COLUMNS, num_warps=8
        )


def penalise(logits: Tensor, entries: Tensor) -> None:
    """See :class:`bough.device.ops.registry.Ops`."""
    fit = logits.dtype == torch.float32 and entries.dtype == torch.int32 and entries.dim() == 2 and len(entries) == 4
    check(fit and logits.is_contiguous() and entries.is_contiguous(), "penalise", logits, entries)
    n = entries.shape[1]
    if n:
        penalise_kernel[(triton.cdiv(n, PENALISED),)](logits, entries, n, logits.shape[1], BLOCK=PENALISED, num_warps=4)


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """See :class:`bough.device.ops.registry.Ops`. Weights are float32 and summed in float64."""
    check_floats("sample", logits)
    n, vocab = logits.shape
    check(draws.n == n and vocab < WIDEST, "sample", logits)
    if vocab == 1:  # Triton takes a 1 for a constant, with which it fails to compile the kernel
        return draws.best.clone()
    out = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        parameters = to_device(draws.columns(uniforms(draws.seeds, draws.positions)), logits.device)
        sample_kernel[(n,)](logits, draws.best, parameters, out, n, vocab, BLOCK=DRAWN, num_warps=8)
    return out


def logprobs(logits: Tensor, tokens: Tensor, n_top: int, asked: Tensor) -> TokenLogprobs:
    """See :class:`bough.device.ops.registry.Ops`."""
    check_floats("logprobs", logits)
    n, vocab = logits.shape
    check(len(tokens) == n and 0 <= n_top <= vocab, "logprobs", logits, tokens)
    out = TokenLogprobs.empty(n, n_top, len(asked), logits.device)
    if n:
        logprobs_kernel[(n,)](
            logits, tokens, asked, out.chosen, out.ranks, out.top_ids, out.top, out.asked, vocab, n_top, len(asked),
            BLOCK=COLUMNS, num_warps=8,
        )  # fmt: skip
    return out
