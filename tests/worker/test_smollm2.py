"""The default model, read from its GGUF file, against transformers reading the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.params import SamplingParams

Make = Callable[..., Any]

PROMPTS = [[34700, 1015, 314], [1, 4093, 198, 5195, 314, 253, 4020, 28, 284, 346, 2316, 30, 2, 198, 1, 520, 9531, 198]]

# What transformers continues them with in float32; the slow test compares.
GOLDEN = [
    [253, 8170, 1183, 282, 253, 1517, 338, 2933, 253, 2244, 5254, 284, 6765, 253, 1685, 1552],
    [57, 5248, 18948, 288, 4875, 338, 346, 2316, 11904, 469, 655, 351, 260, 1679, 30, 339],
]


def run(driver: Any, n: int, chunk: int = 0) -> list[Any]:
    params = SamplingParams(temperature=0.0, logprobs=5)
    seqs = [driver.add(row, ids, params) for row, ids in enumerate(PROMPTS)]
    driver.run(seqs, n, chunk)
    return seqs


def check(seq: Any, logits: torch.Tensor, tolerance: float) -> None:
    """``logits`` [len, V] of transformers for the ids of ``seq``."""
    expected = logits.float().log_softmax(-1)
    for position, entry in enumerate(seq.logprobs, seq.n_prompt):
        row = expected[position - 1]
        scale = float(row.abs().max())
        for token, value in entry.top:
            assert value == pytest.approx(float(row[token]), abs=tolerance * scale)


@pytest.mark.slow
def test_logits_and_greedy_tokens_equal_transformers(default_model: Path, make_driver: Make) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        default_model.parent, gguf_file=default_model.name, dtype=torch.float32
    )
    driver = make_driver(default_model, context_length=256)
    for seq in run(driver, 64, chunk=5):
        prompt = torch.tensor([seq.ids[: seq.n_prompt]])
        expected = model.generate(
            prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0, repetition_penalty=1.0
        )
        assert seq.ids == expected[0].tolist()
        assert seq.generated[:16] in GOLDEN
        with torch.no_grad():
            check(seq, model(torch.tensor([seq.ids])).logits[0], 1e-4)


def test_greedy_tokens_of_the_fast_kernels_in_float32(default_model: Path, make_driver: Make) -> None:
    seqs = run(make_driver(default_model, kernels="auto", context_length=64, n_tokens=512), 16)
    assert [seq.generated for seq in seqs] == GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "least"), [("float16", 0.98), ("bfloat16", 0.95), ("int8", 0.85)])
def test_greedy_agreement_of_rounded_kv(kv_dtype: str, least: float, default_model: Path, make_driver: Make) -> None:
    """Share of the greedy tokens of an unrounded pool that are greedy with a rounded one, too, after the same history;
    and, printed only, how many come before the first difference when each goes its own way."""

    def make(kv_dtype: str) -> Any:
        return make_driver(default_model, kernels="auto", kv_dtype=kv_dtype, context_length=256)

    exact, own = run(make("auto"), 64), run(make(kv_dtype), 64)
    driver, forced = make(kv_dtype), SamplingParams(temperature=0.0, prompt_logprobs=0)
    read = [driver.add(seq.row, seq.ids, forced, logprob_from=seq.n_prompt) for seq in exact]
    driver.run(read, 1)
    ranks = [entry.rank for seq in read for entry in seq.prompt_logprobs]
    assert len(ranks) == 2 * 64
    pairs = [list(zip(a.generated, b.generated)) for a, b in zip(exact, own)]
    alike = [next((i for i, (a, b) in enumerate(p) if a != b), len(p)) for p in pairs]
    print(f"{kv_dtype} KV: {ranks.count(1)} of {len(ranks)} tokens agree; each on its own, the first {alike} do")
    assert ranks.count(1) >= least * len(ranks)


@pytest.mark.slow
def test_bfloat16_and_fast_kernels_stay_near_float32(default_model: Path, make_driver: Make) -> None:
    exact = run(make_driver(default_model, context_length=64, n_tokens=512), 4)
    fast = run(make_driver(default_model, context_length=64, n_tokens=512, dtype=torch.bfloat16, kernels="auto"), 4)
    for a, b in zip(exact, fast):
        # The first token has the same history in both.
        first, other = dict(a.logprobs[0].top), dict(b.logprobs[0].top)
        common = first.keys() & other.keys()
        assert len(common) >= 3
        assert all(abs(first[token] - other[token]) < 0.25 for token in common)
