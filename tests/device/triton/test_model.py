"""A whole model through the Triton ops, and its captured steps replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.params import SamplingParams
from bough.base.plan import PositionLogprobs
from bough.device.layers.dummy import DummyContext
from bough.worker.build import WorkerSizes, build_worker
from bough.worker.graphs import CudaCapture, buckets
from tests.driving import Driver, device_parts, make_driver

from .conftest import DEVICE

N_PROMPT = 9
LOGPROBS = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)


class Eager:
    """Stands for a graph: it runs again what was captured, and leaves the result where that lay."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], None]:
        outputs = run()

        def replay() -> None:
            self.replays += 1
            outputs.copy_(run())

        return replay


def capture() -> Any:
    return CudaCapture() if DEVICE.type == "cuda" else Eager()


def answers(driver: Driver, depth: int = 0) -> list[Any]:
    """Three requests that come and go, their tokens and logprobs."""
    first = driver.add(0, list(range(5, 5 + N_PROMPT)), LOGPROBS)
    driver.step((first, 4))
    second = driver.add(1, list(range(30, 33)), DRAWN, seed=5)
    driver.step((first, 0), (second, 0))
    third = driver.add(2, [7, 8], PENALISED, seed=6)
    driver.step((first, 1), (second, 1), (third, 0))
    for _ in range(3):
        driver.step((first, 1), (second, 1), (third, 1))
    driver.step((first, 1), (third, 1))
    return [first, second, third]


def logprobs(found: list[PositionLogprobs]) -> list[float]:
    return [entry.logprob for entry in found]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("triton"), spread=0.15)


@pytest.mark.parametrize("kernels", ["eager", "captured"])
def test_a_model_through_triton_equals_the_reference(checkpoint: Path, kernels: str) -> None:
    n_rows = 3
    expected = answers(make_driver(checkpoint, kernels="reference", n_rows=n_rows, n_tokens=200))
    how = capture() if kernels == "captured" else None
    driver = make_driver(checkpoint, kernels="triton", n_rows=n_rows, n_tokens=200, capture=how)
    for mine, right in zip(answers(driver), expected):
        assert mine.ids == right.ids and not mine.failed
        for a, b in ((mine.logprobs, right.logprobs), (mine.prompt_logprobs, right.prompt_logprobs)):
            assert torch.allclose(torch.tensor(logprobs(a)), torch.tensor(logprobs(b)), atol=2e-4)
    if isinstance(how, Eager):
        assert how.replays == 4, "steps of decodes alone, of two and of three rows"


MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


class Nothing:
    """The checkpoint of random weights."""

    def names(self) -> list[str]:
        return []


@pytest.mark.parametrize(("quantize", "captured"), [("none", True), ("int8", False)])
def test_steps_that_ask_the_device_are_not_captured(quantize: str, captured: bool) -> None:
    ops, scheme, attention, dtype, device = device_parts("triton", torch.float32, quantize)
    made: list[bool] = []

    def capture(run: Callable[[], Any]) -> Callable[[], None]:
        made.append(run().isfinite().all().item())
        return lambda: None

    context = DummyContext(Nothing(), ops, scheme, attention, dtype, device)
    sizes = WorkerSizes(n_ids=64, context_length=32, n_rows=1)
    build_worker(MIXTRAL, context, sizes, KVConfig(pool_tokens=64), lambda: 1 << 40, capture=capture)
    assert made == ([True] if captured else [])


def test_sizes_of_captured_steps() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    sizes = buckets(256)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-1] == 256 and sizes == sorted(set(sizes))
    assert all(b - a <= max(8, a) for a, b in zip(sizes, sizes[1:]))
    assert buckets(300)[-1] == 300
