"""Sampling kernels against a full sort in float64 and against the reference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from bough.device.ops.sampling import Draws, uniforms

from ..draws import distribution, draws_of
from .conftest import DEVICE

Tensor = torch.Tensor
REFERENCE = ReferenceOps("the twin")


def there(draws: Draws) -> Draws:
    return replace(draws, best=draws.best.to(DEVICE))


def check(ops: Ops, logits: Tensor, rows: list[dict[str, Any]]) -> None:
    draws = draws_of(logits, rows)
    tokens, twin = ops.sample(logits.to(DEVICE), there(draws)).tolist(), REFERENCE.sample(logits, draws).tolist()
    u = uniforms(draws.seeds, draws.positions)
    for i, (token, other) in enumerate(zip(tokens, twin)):
        p = distribution(logits[i], rows[i])
        assert p[token] > 0
        end = p[: token + 1].sum()
        assert end - p[token] - 1e-6 <= u[i] <= end + 1e-6
        # Both may only differ where the draw falls on the edge between two tokens.
        assert token == other or min(abs(u[i] - end), abs(u[i] - end + p[token])) < 1e-6


OPTIONS: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 50}, {"top_p": 0.9}, {"least_z": -3.0}, {"top_k": 1000, "top_p": 0.5}, {"top_k": 2999},
    {"top_p": 0.9999999}, {"top_k": 2000, "top_p": 0.7, "least_z": -1.0}, {"least_z": -100.0}, {"top_p": 1e-12},
    {"temperature": 0.05}, {"temperature": 1e-5}, {"temperature": 1.5, "top_p": 0.95}, {"temperature": 100.0},
]  # fmt: skip


@pytest.mark.parametrize(
    ("spread", "kind", "dtype"),
    [
        pytest.param(0.0, "", torch.float32, marks=pytest.mark.slow),
        (3.0, "", torch.float32),
        pytest.param(3.0, "", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3.0, "ties", torch.float32, marks=pytest.mark.slow),
        (30.0, "holes", torch.float32),
    ],
    ids=str,
)
def test_draws(ops: Ops, spread: float, kind: str, dtype: torch.dtype) -> None:
    logits = torch.randn(len(OPTIONS), 3000, generator=torch.Generator().manual_seed(7)) * spread
    if kind == "ties":
        logits = logits.round()
    if kind == "holes":
        logits[:, ::3] = -torch.inf
    check(ops, logits.to(dtype), [row | {"seed": i + 1, "position": 3 * i} for i, row in enumerate(OPTIONS)])


@pytest.mark.parametrize("vocab", [1, 2, 33, 2048, 2049])
def test_draws_from_any_number_of_tokens(ops: Ops, vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    rows = [{"seed": i, "top_p": 0.7 if i % 2 else 1.0, "top_k": min(vocab, 1 + 3 * i)} for i in range(6)]
    check(ops, logits if vocab > 33 else logits.round(), rows)


def test_a_row_that_is_not_to_be_sampled_may_hold_anything(ops: Ops) -> None:
    logits = torch.randn(4, 100)
    logits[1], logits[2, 5] = torch.nan, torch.inf
    draws = draws_of(logits, [{"top_p": 0.5, "seed": i} for i in range(4)])
    for implementation, where in ((ops, DEVICE), (REFERENCE, torch.device("cpu"))):
        tokens = implementation.sample(logits.to(where), replace(draws, best=draws.best.to(where))).tolist()
        assert tokens[1:3] == [-1, -1] and min(tokens[0], tokens[3]) >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [3, 1000, 5000])
def test_argmax(ops: Ops, vocab: int, dtype: torch.dtype) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1, -1] = logits[1, 1] = 100.0
    logits[2, 0], logits[3, -1] = torch.nan, torch.inf
    logits[4], logits[5, 1:] = -torch.inf, -torch.inf
    out = ops.argmax(logits.to(DEVICE)).cpu()
    assert out.dtype == torch.int64
    assert out[1:6].tolist() == [1, -1, -1, -1, 0]
    assert torch.equal(out, REFERENCE.argmax(logits))


@pytest.mark.parametrize("vocab", [1, 32, 33, 5000])
def test_apply_bitmask(ops: Ops, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, -(-vocab // 32)), np.int32))
    logits, rows = torch.randn(5, vocab), torch.tensor([4, 0, 2])
    expected, mine = logits.clone(), logits.to(DEVICE)
    REFERENCE.apply_bitmask(expected, masks, rows)
    tokens = torch.tensor([7, 7, -1, 7, 7]).to(DEVICE)
    ops.masked_argmax(mine, masks.to(DEVICE), rows.to(DEVICE), tokens)
    best = REFERENCE.argmax(expected).tolist()
    assert tokens.tolist() == [best[0], 7, -1, 7, best[4]]
    ops.apply_bitmask(mine, masks.to(DEVICE), rows.to(DEVICE))
    assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs(ops: Ops, dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 5000, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    logits[1] = logits[1].round()
    logits[2, 100:] = -torch.inf
    tokens, asked = torch.tensor([0, 4999, 3, 7, int(logits[4].argmax())]), torch.tensor([5, 0])
    right = REFERENCE.logprobs(logits, tokens, 7, asked)
    found = ops.logprobs(logits.to(DEVICE), tokens.to(DEVICE), 7, asked.to(DEVICE))
    assert torch.equal(found.ranks.cpu(), right.ranks) and torch.equal(found.top_ids.cpu(), right.top_ids)
    for a, b in ((found.chosen, right.chosen), (found.top, right.top), (found.asked, right.asked)):
        assert torch.allclose(a.cpu(), b, atol=1e-5)


def test_top_tokens_end_where_numbers_do(ops: Ops) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, math.nan]])
    found = ops.logprobs(
        logits.to(DEVICE), torch.tensor([0]).to(DEVICE), 4, torch.tensor([], dtype=torch.int64).to(DEVICE)
    )
    assert found.top_ids.tolist() == [[2, 0, -1, -1]]


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 2000])
def test_penalties(ops: Ops, n: int) -> None:
    g = torch.Generator().manual_seed(n)
    logits = torch.randn(7, 3000, generator=g) * 5
    logits[2, :50] = -torch.inf
    where = torch.randperm(7 * 3000, generator=g)[:n]
    rows, ids = (where // 3000).int(), (where % 3000).int()
    factor, subtracted = torch.rand(n, generator=g) * 3 + 0.1, torch.randn(n, generator=g)
    entries = torch.stack((rows, ids, factor.view(torch.int32), subtracted.view(torch.int32)))
    exact = logits.double()
    for row, token, f, s in zip(rows.tolist(), ids.tolist(), factor.tolist(), subtracted.tolist()):
        value = exact[row, token]
        exact[row, token] = (value / f if value > 0 else value * f) - s
    mine, twin = logits.to(DEVICE), logits.clone()
    ops.penalise(mine, entries.to(DEVICE))
    REFERENCE.penalise(twin, entries)
    for found in (mine.cpu(), twin):
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=1e-5)
    untouched = torch.ones(7 * 3000, dtype=torch.bool)
    untouched[where] = False
    assert torch.equal(mine.cpu().flatten()[untouched], logits.flatten()[untouched])
