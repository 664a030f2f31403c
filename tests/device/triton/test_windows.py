"""Layers that see a window, with cells of their own: the kernel, and the whole engine as it runs on a GPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.messages import Request
from bough.base.params import SamplingParams
from bough.device.ops.registry import Ops
from bough.engine import build as building
from bough.engine.executor import StreamExecutor
from tests.engine.test_equivalence import Numbers, engine, run
from tests.models.parity import CASES, make_checkpoint

from ..cases import make_case
from .conftest import DEVICE
from .eager import Eager
from .test_attention import SPLIT, close
from .test_attention import run as attend


@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 64)], ids=str)
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [1, 9, 64, 65, SPLIT, SPLIT + 1])
def test_nothing_before_the_window_is_read(
    ops: Ops, window: int, chunked: bool, stale: bool, heads: tuple[int, int, int]
) -> None:
    """There is no cell, or one that nobody has written."""
    for lengths, new in (([1, SPLIT + 65, 2 * SPLIT], [1, 1, 1]), ([300, 66, 5], [90, 3, 5])):
        case = make_case(lengths, new, heads, torch.float32, window=window, chunked=chunked)
        if stale:
            owned = case.page_table[case.page_table < len(case.k)]
            spare = next(cell for cell in range(len(case.k)) if case.k[cell].isnan().all())
            assert spare not in owned.tolist()
            case.page_table[case.page_table >= len(case.k)] = spare
        close(attend(ops, case), case)


def requests() -> list[Request]:
    """Texts several windows long, two with a beginning in common and one that is short."""
    rng = np.random.default_rng(5)
    stem = rng.integers(3, 280, 30).tolist()
    prompts = [stem, stem + rng.integers(3, 280, 9).tolist(), rng.integers(3, 280, 5).tolist()]
    params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=8)
    return [
        Request(rid=str(i), ids=np.array(prompt, "<i4").tobytes(), params=params) for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Layers that see 10 positions between layers that see all."""
    folder, case = tmp_path_factory.mktemp("gemma"), CASES["gemma3_text"]
    options = {**case.options, "vocab_size": 288, "num_hidden_layers": 2}
    options["layer_types"] = ["sliding_attention", "full_attention"]
    make_checkpoint(replace(case, options=options), folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, folder)
    return folder


@pytest.mark.skipif(DEVICE.type == "cuda", reason="where benchmarks/gpu compares whole engines")
@pytest.mark.parametrize(
    "kv", [pytest.param({}, marks=pytest.mark.slow), {"pool_tokens": 160, "page_size": 4}], ids=["wide", "narrow"]
)
def test_the_engine_of_a_gpu_gives_what_one_pool_gives(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, kv: dict[str, Any]
) -> None:
    """Streams, captured steps and Triton's kernels against the reference without windows of their own."""
    core = engine(gemma, {"cache": "none"}, {"max_running": 1}, Numbers("reference", "float32"))
    assert [kind.kind for kind in core.hello.cache] == ["full"]
    expected, _ = run(core, requests(), together=False)
    core.close()

    from bough.device.ops.triton.ops import TritonOps

    how = Eager()
    monkeypatch.setattr(building, "resolve_ops", lambda kernels, device, spare: TritonOps(DEVICE, "under test"))
    monkeypatch.setattr(building, "LocalExecutor", StreamExecutor)
    monkeypatch.setattr(building, "CudaCapture", lambda: how)
    core = engine(gemma, kv, {"max_running": 3, "step_tokens": 24, "depth": 1}, Numbers("auto", "float32"))
    window = next(kind for kind in core.hello.cache if kind.kind == "window")
    assert window.tokens < core.hello.pool_tokens
    for _ in range(2):  # cold, then with what is cached
        found, _ = run(core, requests(), together=True)
        for rid, right in expected.items():
            assert found[rid].tokens == right.tokens and found[rid].finish == right.finish
            mine, theirs = ([entry.logprob for entry in answer.logprobs] for answer in (found[rid], right))
            assert np.allclose(mine, theirs, atol=2e-4)
    stats = core.scheduler.stats()
    assert stats.cached_tokens > 0
    assert stats.window_tokens == window.tokens == stats.free_window_tokens + stats.idle_window_tokens
    core.close()
    assert how.replays > 4
