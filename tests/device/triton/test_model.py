"""A whole model through the Triton ops, and its captured steps replayed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.params import SamplingParams
from bough.base.plan import NO_ADAPTER, PositionLogprobs
from bough.device.layers.context import LayerContext
from bough.device.layers.dummy import DummyContext
from bough.device.lora.pool import AdapterPool
from bough.weights.adapter import read_adapter
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from bough.worker.graphs import CudaCapture, buckets
from tests.driving import Driver, device_parts, make_driver
from tests.lora import TARGETS, write_adapter

from .conftest import DEVICE
from .eager import Eager

N_PROMPT = 9
LOGPROBS = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2)
DRAWN = SamplingParams(temperature=0.8, top_k=20, top_p=0.9)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)


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
    n_rows = 5  # a step of three rows is filled up to four
    expected = answers(make_driver(checkpoint, kernels="reference", n_rows=n_rows, n_tokens=200))
    how = capture() if kernels == "captured" else None
    driver = make_driver(checkpoint, kernels="triton", n_rows=n_rows, n_tokens=200, capture=how)
    driver.pages.sort(reverse=True)  # the first cells are somebody's: what a row of nobody writes there would show
    pool = driver.worker._runner._pool
    with torch.inference_mode():
        for cells in (*pool.k, *pool.v):  # what nobody has written reaches nobody
            cells.fill_(torch.nan)
    for mine, right in zip(answers(driver), expected):
        assert mine.ids == right.ids and not mine.failed
        for a, b in ((mine.logprobs, right.logprobs), (mine.prompt_logprobs, right.prompt_logprobs)):
            assert torch.allclose(torch.tensor(logprobs(a)), torch.tensor(logprobs(b)), atol=2e-4)
    if isinstance(how, Eager):
        assert how.replays == 4, "steps of decodes alone, of two and of three rows"


def test_rows_with_adapters_in_captured_steps(checkpoint: Path, tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / str(i), checkpoint, TARGETS[i:], 4 << i, seed=i) for i in range(2)]
    found = []
    for kernels, how in (("reference", None), ("triton", capture())):
        ops, scheme, attention, dtype, device = device_parts(kernels, torch.float32)
        pool, source = AdapterPool(ops, dtype, 2), open_checkpoint(checkpoint)
        context = LayerContext(source, ops, scheme, attention, dtype, device, pool)
        sizes = WorkerSizes(n_ids=1 << 20, context_length=64, n_rows=3)
        built = build_worker(
            source.config, context, sizes, KVConfig(pool_tokens=200), lambda: 1 << 40, capture=how
        )  # fmt: skip
        source.close()
        for place, folder in enumerate(folders):
            pool.install(place, read_adapter(folder))
        driver = Driver(built.worker, built.pool_tokens)
        seqs = [driver.add(row, [5 + row, 9, 3], LOGPROBS) for row in range(3)]
        for seq, place in zip(seqs, (0, NO_ADAPTER, 1)):
            seq.init = replace(seq.init, adapter=place)
        driver.run(seqs, 4)
        driver.release(seqs[0])
        # The place is taken by another adapter, and the captured step finds it there.
        pool.clear(0)
        pool.install(0, read_adapter(folders[1]))
        last = driver.add(0, [5, 9, 3], LOGPROBS)
        last.init = replace(last.init, adapter=0)
        driver.run([last, *seqs[1:]], 5)
        found.append([*seqs, last])
        if isinstance(how, Eager):
            assert how.replays > 4
    for mine, right in zip(found[1], found[0]):
        assert mine.ids == right.ids
        assert torch.allclose(torch.tensor(logprobs(mine.logprobs)), torch.tensor(logprobs(right.logprobs)), atol=2e-4)
    assert found[0][0].ids != found[0][3].ids


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


@pytest.mark.parametrize(
    ("quantize", "inner", "captured"), [("none", 32, True), ("int8", 32, True), ("int4", 32, True), ("int8", 24, False)]
)
def test_steps_that_ask_the_device_are_not_captured(quantize: str, inner: int, captured: bool) -> None:
    """As those of experts do whose weights are in several pieces: gates, and values, that fill no panels."""
    ops, scheme, attention, dtype, device = device_parts("triton", torch.float32, quantize)
    made: list[bool] = []

    def capture(run: Callable[[], Any]) -> Callable[[], None]:
        made.append(run().isfinite().all().item())
        return lambda: None

    context = DummyContext(Nothing(), ops, scheme, attention, dtype, device)
    sizes = WorkerSizes(n_ids=64, context_length=32, n_rows=1)
    config = MIXTRAL | {"intermediate_size": inner}
    build_worker(config, context, sizes, KVConfig(pool_tokens=64), lambda: 1 << 40, capture=capture)
    assert made == ([True] if captured else [])


def test_sizes_of_captured_steps() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    sizes = buckets(256)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-1] == 256 and sizes == sorted(set(sizes))
    assert all(b - a <= max(8, a) for a, b in zip(sizes, sizes[1:]))
    assert buckets(300)[-1] == 300
