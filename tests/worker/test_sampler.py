"""The sampler: every feature against a slow float64 twin, draws against their distribution, rows against company."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.params import SamplingParams
from bough.base.plan import RowInit
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.sampling import uniforms
from bough.worker.sampling.base import SampleContext
from bough.worker.sampling.sampler import Sampler

VOCAB = 40
Floats = np.ndarray[Any, np.dtype[np.float64]]


def init_of(row: int, prompt: list[int], generated: list[int], params: SamplingParams, seed: int = 0) -> RowInit:
    ids = np.array(prompt + generated, np.int32)
    return RowInit(row, np.zeros(0, np.int32), ids, len(prompt), params, seed, (1, 2), len(prompt))


def sampler_of(vocab: int) -> Sampler:
    return Sampler(vocab, ReferenceOps("asked for"))


def twin_logits(raw: Floats, prompt: list[int], generated: list[int], p: SamplingParams) -> Floats:
    """Penalties, bias and masks, one token at a time."""
    out = raw.copy()
    for token in range(len(raw)):
        if token in prompt or token in generated:
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
        out[token] -= p.frequency_penalty * generated.count(token)
        out[token] -= p.presence_penalty * (token in generated)
        out[token] += p.logit_bias.get(token, 0.0)
        if p.allowed_token_ids and token not in p.allowed_token_ids:
            out[token] = -math.inf
        if token in (1, 2, *p.stop_token_ids) and len(generated) < p.min_tokens:
            out[token] = -math.inf
    for word in p.bad_words:
        n = len(word) - 1
        if tuple(generated[len(generated) - n :] if n else []) == word[:-1]:
            out[word[-1]] = -math.inf
    return out


def twin_probabilities(logits: Floats, p: SamplingParams) -> Floats:
    """Temperature, top-k, top-p, min-p by full sorts."""
    weights = np.exp((logits - logits.max()) / p.temperature)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    total, kept, reached = sum(weights[i] for i in order), [], 0.0
    for i in order:
        kept.append(i)
        reached += weights[i]
        if reached >= p.top_p * total:
            break
    kept = [i for i in kept if weights[i] >= p.min_p * weights.max()]
    out = np.zeros_like(weights)
    out[kept] = weights[kept]
    return out / out.sum()


def raw_logits(seed: int, n: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3


tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, -1, 1, 5, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.dictionaries(tokens, st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.one_of(st.just(()), st.lists(tokens, min_size=1, max_size=6).map(tuple)),
    min_tokens=st.sampled_from([0, 2, 5]),
    stop_token_ids=st.lists(tokens, max_size=2).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
histories = st.tuples(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, max_size=6))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(params, histories, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=4), st.integers(0, 9)
)
def test_every_feature_equals_its_slow_twin(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]], int]], salt: int
) -> None:
    sampler = sampler_of(VOCAB)
    raw = raw_logits(salt, len(rows))
    for row, (p, (prompt, generated), seed) in enumerate(rows):
        # The first half of what was generated comes with the row (a retraction), the rest is sampled here.
        half = len(generated) // 2
        sampler.add(row, init_of(row, prompt, generated[:half], p, seed))
        for token in generated[half:]:
            sampler.accept(row, token)
    positions = np.array([len(prompt) + len(generated) for _, (prompt, generated), _ in rows])
    sampled = sampler.sample(raw.clone(), SampleContext(list(range(len(rows))), positions))
    for row, (p, (prompt, generated), seed) in enumerate(rows):
        logits = twin_logits(raw[row].double().numpy(), prompt, generated, p)
        if logits.max() == -math.inf:
            assert "no token" in sampled.failed[row].message
        elif p.temperature == 0.0:
            assert logits[sampled.tokens[row]] >= logits.max() - 1e-4
        else:
            # The draw may differ from the twin's only by float32 rounding at the edge of a token's interval.
            ends = twin_probabilities(logits, p).cumsum()
            token = sampled.tokens[row]
            u = uniforms(np.array([seed % 2**64], np.uint64), positions[row : row + 1])[0]
            low = ends[token - 1] if token else 0.0
            assert low - 1e-5 <= u <= ends[token] + 1e-5
            assert ends[token] > low


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(params, histories, st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=5),
    st.integers(0, 999),
)
def test_what_a_mask_forbids_is_as_if_it_were_not_there(
    rows: list[tuple[SamplingParams, tuple[list[int], list[int]], int]], salt: int
) -> None:
    rng, n = np.random.default_rng(salt), len(rows)
    sampler, raw = sampler_of(VOCAB), raw_logits(salt, n)
    for row, (p, (prompt, generated), seed) in enumerate(rows):
        sampler.add(row, init_of(row, prompt, generated, p, seed))
    positions = np.array([len(prompt) + len(generated) for _, (prompt, generated), _ in rows])
    masked = np.flatnonzero(rng.random(n) < 0.7)
    allowed = rng.random((len(masked), 64)) < 0.2
    bits = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view("<i4").astype(np.int32))
    before = raw.clone()
    found = sampler.sample(raw, SampleContext(list(range(n)), positions, masked, bits))
    assert torch.equal(raw, before)
    raw[torch.from_numpy(masked)] = raw[torch.from_numpy(masked)].masked_fill(
        torch.from_numpy(~allowed[:, :VOCAB]), -torch.inf
    )
    twin = sampler.sample(raw, SampleContext(list(range(n)), positions))
    assert found.failed.keys() == twin.failed.keys()
    assert [t for i, t in enumerate(found.tokens) if i not in found.failed] == [
        t for i, t in enumerate(twin.tokens) if i not in twin.failed
    ]


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02}],
)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    p = SamplingParams(**options)
    raw, n = raw_logits(3), 4000
    expected = twin_probabilities(raw[0].double().numpy(), p) * n
    counts = np.zeros(VOCAB)
    for first in range(0, n, 500):
        sampler = sampler_of(VOCAB)
        for row in range(500):
            sampler.add(row, init_of(row, [0], [], p, seed=first + row))
        result = sampler.sample(raw.repeat(500, 1), SampleContext(list(range(500)), np.full(500, 11)))
        np.add.at(counts, result.tokens, 1)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    rare = ~common & (expected > 0)
    observed = np.append(counts[common], counts[rare].sum())
    wanted = np.append(expected[common], max(expected[rare].sum(), 1e-9))
    keep = wanted > 1
    chi2 = ((observed - wanted)[keep] ** 2 / wanted[keep]).sum()
    freedom = keep.sum() - 1
    # Fixed seeds: a bound of the mean plus four standard deviations either holds always or never.
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom)


def test_uniforms_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    n = 20000
    many = np.arange(n, dtype=np.uint64)
    for u in (
        uniforms(np.full(n, 7, np.uint64), np.arange(n)),
        uniforms(many, np.full(n, 3)),
        uniforms(many, many.astype(int)),
    ):
        assert 0.0 <= u.min() and u.max() < 1.0
        counts = np.histogram(u, 50, (0, 1))[0]
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 49 + 4 * math.sqrt(98)
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
        assert len(np.unique(u)) == n


def test_a_row_does_not_depend_on_its_company() -> None:
    vocab = 5000
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.01}, {"repetition_penalty": 1.2},
        {"logit_bias": {3: 5.0}}, {"logprobs": 3}, {"temperature": 0.7, "top_p": 0.5}, {"bad_words": ((4,),)},
    ]  # fmt: skip
    raw = raw_logits(5, len(options), vocab)

    def choose(order: list[int]) -> dict[int, tuple[int, Any]]:
        sampler = sampler_of(vocab)
        for i in order:
            sampler.add(i, init_of(i, [5, 6], [7], SamplingParams(**options[i]), seed=100 + i))
        result = sampler.sample(raw[order].clone(), SampleContext(order, np.full(len(order), 3)))
        return {i: (result.tokens[at], result.logprobs.get(at)) for at, i in enumerate(order)}

    together = choose(list(range(len(options))))
    assert choose(list(reversed(range(len(options))))) == together
    for i in range(len(options)):
        assert choose([i])[i] == together[i]


def test_greedy_ties_go_to_the_lowest_id_in_any_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 3000, dtype=dtype)
        logits[1, [700, 20, 2999]] = 1.0
        sampler = sampler_of(3000)
        for row in range(3):
            sampler.add(row, init_of(row, [0], [], SamplingParams(temperature=0.0)))
        assert sampler.sample(logits, SampleContext([0, 1, 2], np.ones(3, np.int64))).tokens == [0, 20, 0]


def test_rows_with_bad_logits_fail_alone() -> None:
    raw = raw_logits(1, 5)
    clean = raw.clone()
    raw[1, 3], raw[2, 5], raw[3] = math.nan, math.inf, -math.inf
    for temperature in (0.0, 1.0):
        sampler = sampler_of(VOCAB)
        for row in range(5):
            sampler.add(row, init_of(row, [0], [], SamplingParams(temperature=temperature, logprobs=1), seed=row))
        context = SampleContext(list(range(5)), np.ones(5, np.int64))
        result = sampler.sample(raw.clone(), context)
        assert sorted(result.failed) == [1, 2, 3]
        assert sorted(result.logprobs) == [0, 4]
        expected = sampler.sample(clean.clone(), context).tokens
        assert [result.tokens[i] for i in (0, 4)] == [expected[i] for i in (0, 4)]


def test_contradicting_rules_fail_the_row_alone() -> None:
    sampler = sampler_of(VOCAB)
    sampler.add(0, init_of(0, [0], [], SamplingParams(allowed_token_ids=(1,), min_tokens=2)))
    sampler.add(1, init_of(1, [0], [], SamplingParams(temperature=0.0)))
    raw = raw_logits(0, 2)
    result = sampler.sample(raw.clone(), SampleContext([0, 1], np.ones(2, np.int64)))
    assert list(result.failed) == [0] and result.tokens[1] == int(raw[1].argmax())


def test_a_removed_row_leaves_nothing_behind() -> None:
    everything = SamplingParams(
        top_k=2, repetition_penalty=2.0, logit_bias={3: 9.0}, allowed_token_ids=(4, 5), min_tokens=9, logprobs=2,
        bad_words=((6,),),
    )  # fmt: skip
    sampler = sampler_of(VOCAB)
    raw = raw_logits(8)
    sampler.add(0, init_of(0, [1], [2], everything, seed=1))
    sampler.remove(0)
    sampler.add(0, init_of(0, [1], [], SamplingParams(temperature=0.0)))
    result = sampler.sample(raw.clone(), SampleContext([0], np.ones(1, np.int64)))
    assert result.tokens == [int(raw.argmax())] and not result.logprobs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 20), st.lists(tokens, max_size=3), st.booleans())
def test_logprobs_are_those_of_the_raw_logits(seed: int, n_top: int, asked: list[int], coarse: bool) -> None:
    raw = raw_logits(seed)
    if coarse:
        raw = raw.round()  # many ties
    p = SamplingParams(
        temperature=1.5, logprobs=n_top, logprob_token_ids=tuple(asked), repetition_penalty=1.5, logit_bias={0: 2.0}
    )
    sampler = sampler_of(VOCAB)
    sampler.add(0, init_of(0, [3, 4], [5], p, seed))
    result = sampler.sample(raw.clone(), SampleContext([0], np.full(1, 3)))
    expected = torch.log_softmax(raw[0].double(), -1).tolist()
    (entry,) = result.logprobs[0]
    order = sorted(range(VOCAB), key=lambda i: (-raw[0, i].item(), i))
    assert entry.token == result.tokens[0] and entry.rank == order.index(entry.token) + 1
    assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
    assert [i for i, _ in entry.top] == order[:n_top] and [i for i, _ in entry.asked] == asked
    for i, value in (*entry.top, *entry.asked):
        assert value == pytest.approx(expected[i], abs=1e-5)
