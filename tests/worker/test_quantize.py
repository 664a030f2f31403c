"""Models with rounded weights: the kernels against the reference, end to end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bough.base.params import SamplingParams
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import resolve_ops

Make = Callable[..., Any]

IDS = [5, 9, 2, 40, 17, 33, 8, 51, 60, 3, 3, 12]


def logprobs(driver: Any, n: int = 6, chunk: int = 0, first: int = 0) -> list[dict[int, float]]:
    """Of three prompts, which begin with different ids."""
    ids = IDS[first:] + IDS[:first]
    seqs = [driver.add(row, ids[row:], SamplingParams(temperature=0.0, logprobs=5)) for row in range(3)]
    driver.run(seqs, n, chunk)
    return [dict(entry.top) for seq in seqs for entry in seq.logprobs[:1]]


def distances(a: list[dict[int, float]], b: list[dict[int, float]]) -> list[float]:
    """The largest difference of each prompt, none of which is NaN."""
    found = []
    for x, y in zip(a, b, strict=True):
        common = x.keys() & y.keys()
        assert len(common) >= 3
        assert all(math.isfinite(x[token] - y[token]) for token in common)
        found.append(max(abs(x[token] - y[token]) for token in common))
    return found


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_kernels_equal_the_reference(
    quantize: str, tiny_llama: Make, make_driver: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of packed weights; what serves without kernels decodes them once and rounds no inputs. An input that is
    nearly halfway between two whole numbers may become the other one where sums have another order: of few prompts."""
    folder, _ = tiny_llama()
    kernels = resolve_ops("auto")
    monkeypatch.setattr(ReferenceOps, "name", "packed reference")
    monkeypatch.setattr(ReferenceOps, "suited", lambda self, weight: kernels.suited(weight))
    slow = make_driver(folder, quantize=quantize)
    fast = make_driver(folder, quantize=quantize, kernels="auto")
    found = [d for first in range(6) for d in distances(logprobs(slow, first=first), logprobs(fast, first=first))]
    assert sorted(found)[-3] < 1e-4 and max(found) < 0.3, found


@pytest.mark.parametrize("quantize", ["auto", "int8"])
def test_rounded_weights_stay_near_the_exact_ones(quantize: str, tiny_llama: Make, make_driver: Make) -> None:
    folder, _ = tiny_llama()
    exact = logprobs(make_driver(folder))
    found = logprobs(make_driver(folder, quantize=quantize, kernels="auto", dtype=torch.bfloat16))
    assert max(distances(exact, found)) < 0.3


@pytest.mark.parametrize("quantize", ["auto", "int8", "int4"])
def test_logits_do_not_depend_on_chunks_and_company(quantize: str, tiny_llama: Make, make_driver: Make) -> None:
    folder, _ = tiny_llama()

    def outcome(chunk: int, company: int) -> Any:
        driver = make_driver(folder, quantize=quantize, kernels="auto", dtype=torch.bfloat16)
        params = SamplingParams(temperature=0.0, logprobs=3)
        seqs = [driver.add(row, IDS[row:], params) for row in range(1 + company)]
        driver.run(seqs, 8, chunk)
        return seqs[0].ids, seqs[0].logprobs

    assert outcome(0, 0) == outcome(3, 4) == outcome(1, 2)
