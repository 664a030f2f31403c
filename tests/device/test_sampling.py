"""Draws, masks and log-probabilities: every implementation against the reference and float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from bough.device.ops.sampling import invert, uniforms

from .draws import distribution, draws_of

Tensor = torch.Tensor
REFERENCE = ReferenceOps("the twin")

pytestmark = pytest.mark.usefixtures("poisoned")

# The ops of an example are those of the test: nothing of them changes between examples.
relaxed = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(ops: Ops, logits: Tensor, rows: list[dict[str, Any]]) -> None:
    draws = draws_of(logits, rows)
    tokens, twin = ops.sample(logits, draws), REFERENCE.sample(logits, draws)
    assert tokens.dtype == torch.int64
    u = uniforms(draws.seeds, draws.positions)
    for i, (token, other) in enumerate(zip(tokens.tolist(), twin.tolist())):
        p = distribution(logits[i], rows[i])
        assert p[token] > 0
        end = p[: token + 1].sum()
        assert end - p[token] - 1e-6 <= u[i] <= end + 1e-6
        # Both may only differ where the draw falls on the edge between two tokens.
        assert token == other or min(abs(u[i] - end), abs(u[i] - end + p[token])) < 1e-6


seeds = st.integers(0, 2**64 - 1)
filters = st.fixed_dictionaries(
    {"seed": seeds, "position": st.integers(0, 5000)},
    optional={
        "temperature": st.sampled_from([1e-5, 0.01, 0.7, 1.0, 2.0, 100.0]),
        "top_k": st.sampled_from([1, 2, 5, 50, 2000]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999]),
        "least_z": st.sampled_from([0.0, math.log(0.5), math.log(0.02), -20.0]),
    },
)


@relaxed
@given(
    st.sampled_from([1, 3, 16, 255, 256, 257, 3001]),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.01, 1.0, 5.0, 100.0]),
    st.sampled_from(["smooth", "ties", "holes"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(filters, min_size=1, max_size=5),
)
def test_draws_equal_the_reference(
    ops: Ops, vocab: int, salt: int, spread: float, kind: str, dtype: torch.dtype, rows: list[dict[str, Any]]
) -> None:
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(salt)) * spread
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "holes":
        logits[:, :: 3 if vocab > 1 else 2] = -torch.inf if vocab > 1 else 0.0
    rows = [row | {"top_k": min(row.get("top_k", vocab), vocab)} for row in rows]
    check(ops, logits.to(dtype), rows)


@pytest.mark.parametrize("spread", [0.0, 0.001, 0.3, 3.0, 30.0])
def test_draws_from_a_large_vocabulary(ops: Ops, spread: float) -> None:
    if ops.name == "reference":
        pytest.skip("it is what the others are compared with")
    logits = torch.randn(12, 49152, generator=torch.Generator().manual_seed(7)) * spread
    options: list[dict[str, Any]] = [
        {}, {"top_k": 50}, {"top_p": 0.9}, {"least_z": -3.0}, {"top_k": 1000, "top_p": 0.5}, {"top_k": 49151},
        {"top_p": 0.9999999}, {"top_k": 30000, "top_p": 0.7, "least_z": -1.0}, {"least_z": -100.0}, {"top_p": 1e-12},
        {"temperature": 0.05}, {"temperature": 1.5, "top_p": 0.95},
    ]  # fmt: skip
    rows = [row | {"seed": i + 1, "position": 3 * i} for i, row in enumerate(options)]
    check(ops, logits, rows)
    check(ops, logits.bfloat16(), rows)


def test_no_rows_draw_nothing(ops: Ops) -> None:
    nothing = torch.empty(0, 600)
    assert ops.sample(nothing, draws_of(nothing, [])).shape == (0,)


def test_a_draw_does_not_depend_on_company_or_threads(ops: Ops) -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(3))
    rows: list[dict[str, Any]] = [{"seed": i, "position": i, "top_p": 0.9 if i % 2 else 1.0} for i in range(9)]
    together = ops.sample(logits, draws_of(logits, rows)).tolist()
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert ops.sample(logits, draws_of(logits, rows)).tolist() == together
            assert [
                int(ops.sample(logits[i : i + 1], draws_of(logits[i : i + 1], rows[i : i + 1]))) for i in range(9)
            ] == together
    finally:
        torch.set_num_threads(before)


def test_draws_follow_the_distribution(ops: Ops) -> None:
    logits = torch.randn(1, 600, generator=torch.Generator().manual_seed(5)) * 2
    n = 8000
    for options in ({}, {"top_k": 40}, {"top_p": 0.8}, {"least_z": math.log(0.05)}):
        rows = [options | {"seed": i} for i in range(n)]
        many = logits.expand(n, -1).contiguous()
        drawn = ops.sample(many, draws_of(many, rows)).numpy()
        assert drawn.max() < 600
        counts = np.bincount(drawn, minlength=600)
        expected = distribution(logits[0], options) * n
        assert counts[expected == 0].sum() == 0
        common = expected >= 5
        chi2 = ((counts - expected)[common] ** 2 / expected[common]).sum()
        freedom = int(common.sum()) - 1
        # Fixed seeds: a bound of the mean plus four standard deviations either holds always or never.
        assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


@settings(relaxed, max_examples=200)
@given(st.integers(1, 700), st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.999999, 1 - 2**-53]), st.booleans())
def test_no_token_without_weight_is_drawn(width: int, seed: int, u: float, sparse: bool) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((2, width)) * (rng.random((2, width)) < (0.05 if sparse else 0.9))
    weights[:, rng.integers(width)] = 1e-30
    w = torch.from_numpy(weights).float()
    chosen = invert(w, torch.tensor([u, 0.0], dtype=torch.float64))
    assert (w.gather(1, chosen[:, None]) > 0).all()
    assert chosen[1] == w[1].nonzero()[0, 0]
    ends = w[0].double().cumsum(0)
    before = ends[chosen[0]] - w[0, chosen[0]]
    assert before - 1e-9 * ends[-1] <= u * ends[-1] <= ends[chosen[0]] + 1e-9 * ends[-1]


def test_ties_in_filters_go_to_the_lowest_ids(ops: Ops) -> None:
    n, vocab = 300, 3000
    logits = torch.zeros(n, vocab)
    logits[:, [10, 20, 2000]] = 1.0
    for options, kept in (({"top_k": 5}, {0, 1, 10, 20, 2000}), ({"top_k": 2}, {10, 20}), ({"top_p": 1e-9}, {10})):
        drawn = ops.sample(logits, draws_of(logits, [options | {"seed": i} for i in range(n)]))
        assert set(drawn.tolist()) == kept
    flat = torch.zeros(n, vocab)
    drawn = ops.sample(flat, draws_of(flat, [{"top_p": 0.5, "seed": i} for i in range(n)]))
    assert int(drawn.max()) < 1500


@relaxed
@given(
    st.sampled_from([1, 5, 31, 1000]),
    st.integers(0, 1000),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.data(),
)
def test_logprobs(ops: Ops, vocab: int, salt: int, n_top: int, coarse: bool, dtype: torch.dtype, data: Any) -> None:
    n_top = min(n_top, vocab)
    raw = torch.randn(3, vocab, generator=torch.Generator().manual_seed(salt)) * 5
    logits = (raw.round() if coarse else raw).to(dtype)
    logits[1, 0] = -torch.inf if vocab > 1 else 0.0
    ids = st.lists(st.integers(0, vocab - 1), min_size=3, max_size=3)
    tokens, asked = torch.tensor(data.draw(ids)), torch.tensor(data.draw(ids))
    found = ops.logprobs(logits, tokens, n_top, asked)
    exact = logits.double().log_softmax(-1)
    order = logits.float().argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.top_ids, order[:, :n_top])
    assert found.ranks.tolist() == [int((order[i] == t).nonzero()) + 1 for i, t in enumerate(tokens)]
    assert torch.allclose(found.chosen.double(), exact.gather(1, tokens[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(found.top.double(), exact.gather(1, found.top_ids), atol=1e-5)
    assert torch.allclose(found.asked.double(), exact[:, asked], atol=1e-5)


def test_logprobs_of_a_large_vocabulary(ops: Ops) -> None:
    logits = torch.randn(5, 49152, generator=torch.Generator().manual_seed(1)) * 4
    logits[1] = torch.arange(49152) / 1000.0  # every token is larger than all before it
    logits[2] = 1.0
    tokens = torch.tensor([0, 5, 49151, 77, 40000])
    found, twin = (o.logprobs(logits, tokens, 20, torch.tensor([3, 4])) for o in (ops, REFERENCE))
    assert torch.equal(found.top_ids, twin.top_ids) and torch.equal(found.ranks, twin.ranks)
    for a, b in ((found.chosen, twin.chosen), (found.top, twin.top), (found.asked, twin.asked)):
        assert torch.allclose(a, b, atol=1e-5)


@relaxed
@given(st.sampled_from([1, 31, 32, 33, 1000]), st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_bitmasks(ops: Ops, vocab: int, seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((2, vocab)) < rng.choice([0.0, 0.01, 0.5, 1.0], (2, 1))
    padded = np.pad(allowed, ((0, 0), (0, -vocab % 32)))
    words = np.packbits(padded, axis=1, bitorder="little").view("<i4").astype(np.int32)
    logits = torch.from_numpy(rng.standard_normal((4, vocab))).to(dtype)
    expected = logits.clone()
    for line, row in enumerate((3, 1)):
        expected[row, torch.from_numpy(~allowed[line])] = -torch.inf
    ops.apply_bitmask(logits, torch.from_numpy(words), torch.tensor([3, 1]))
    assert torch.equal(logits, expected)
    ops.apply_bitmask(logits, torch.zeros((0, words.shape[1]), dtype=torch.int32), torch.zeros(0, dtype=torch.int64))
    assert torch.equal(logits, expected)


@relaxed
@given(
    st.sampled_from([1, 31, 32, 33, 100, 1000, 1025]), st.integers(0, 1000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_argmax_under_bitmasks(ops: Ops, vocab: int, seed: int, dtype: torch.dtype) -> None:
    """What is forbidden may hold anything, a mask may have bits beyond the vocabulary, and the first of equals wins."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.standard_normal((6, vocab)).round(rng.integers(0, 4))).to(dtype)
    for value in (torch.nan, torch.inf, -torch.inf):
        row, n = rng.integers(6), rng.integers(vocab + 1)
        logits[row, torch.from_numpy(rng.permutation(vocab)[:n])] = value
    allowed = rng.random((4, -(-vocab // 32) * 32)) < rng.choice([0.0, 0.01, 0.5, 0.99, 1.0], (4, 1))
    allowed[:, ::7] &= bool(rng.integers(2))
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32))
    rows = torch.from_numpy(rng.permutation(6)[:4])
    before = logits.clone()
    tokens = torch.tensor([-1, 1, 2, 3, 4, 5])
    ops.masked_argmax(logits, masks, rows, tokens)
    assert torch.equal(logits.nan_to_num(nan=7.5), before.nan_to_num(nan=7.5))
    assert [tokens[row] for row in range(6) if row not in rows] == [row or -1 for row in range(6) if row not in rows]
    for line, row in enumerate(rows.tolist()):
        token = tokens[row]
        ids = np.flatnonzero(allowed[line, :vocab])
        values = logits[row].float().numpy()[ids]
        broken = row == 0 or not len(ids) or not (values < np.inf).all() or values.max() == -np.inf
        assert token == (-1 if broken else ids[values.argmax()])
    left = tokens.clone()
    ops.masked_argmax(logits, masks[:0], rows[:0], tokens)
    assert torch.equal(tokens, left)


def test_wrong_arguments_are_refused(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("torch itself refuses them")
    logits = torch.zeros(2, 64)
    mask, row = torch.zeros((1, 2), dtype=torch.int32), torch.tensor([0])
    with pytest.raises(ValueError, match="apply_bitmask"):
        ops.apply_bitmask(logits, mask[:, :1], row)
    with pytest.raises(ValueError, match="apply_bitmask"):
        ops.apply_bitmask(logits, mask, torch.tensor([2]))
    with pytest.raises(ValueError, match="masked_argmax"):
        ops.masked_argmax(logits, mask, torch.tensor([-1]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="masked_argmax"):
        ops.masked_argmax(logits, mask, row, torch.tensor([0]))
    with pytest.raises(ValueError, match="int32"):
        ops.apply_bitmask(logits, mask.long(), row)
    with pytest.raises(ValueError, match="sample"):
        ops.sample(logits, draws_of(logits[:1], [{}]))
    with pytest.raises(ValueError, match="logprobs"):
        ops.logprobs(logits, torch.tensor([1]), 1, torch.zeros(0, dtype=torch.int64))
