"""Layers that see a window, with cells of their own, in the real engine: bit for bit what one pool for all gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_equivalence import NUMBERS, engine, run, workload
from tests.models.parity import CASES, make_checkpoint
from tests.models.test_fallback import CASES as FALLBACK

Make = Callable[[str], Path]

ONE_POOL = {"max_running": 1, "step_tokens": 4096}
"""Windows need more cells than the pool has tokens, so they get no pool of their own."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Make:
    """name of a case -> a folder with its checkpoint and a tokenizer, made once."""
    known: dict[str, Path] = {}

    def made(name: str) -> Path:
        if name not in known:
            known[name] = folder = tmp_path_factory.mktemp(name)
            case = {**CASES, **FALLBACK}[name]
            make_checkpoint(replace(case, options={**case.options, "vocab_size": 288}), folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(tiny_model / file, folder)
        return known[name]

    return made


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({}, {"max_running": 8, "step_tokens": 24}),
    "pages": ({"page_size": 4}, {"max_running": 8, "step_tokens": 64, "depth": 1}),
    "few cells": ({"pool_tokens": 260}, {"max_running": 4, "step_tokens": 24, "depth": 1}),
    "no cache": ({"cache": "none"}, {"max_running": 8, "step_tokens": 24}),
}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param("gemma3_text", "float32", marks=pytest.mark.slow),
        ("gemma3_text", "bfloat16"),
        pytest.param("mistral-window", "float32", marks=pytest.mark.slow),
        pytest.param("olmo3", "float32", marks=pytest.mark.slow),
    ],
)
def test_a_pool_of_their_own_changes_no_bit(name: str, numbers: str, make: Make) -> None:
    requests = workload()
    core = engine(make(name), {"cache": "none"}, ONE_POOL, NUMBERS[numbers])
    assert [kind.kind for kind in core.hello.cache] == ["full"]
    expected, _ = run(core, requests, together=False)
    core.close()
    for label, (kv, schedule) in CONFIGS.items():
        core = engine(make(name), kv, schedule, NUMBERS[numbers])
        window = next(kind for kind in core.hello.cache if kind.kind == "window")
        assert window.tokens < core.hello.pool_tokens
        for _ in range(2):  # cold, then with what is cached
            found, _ = run(core, requests, together=True)
            if name in FALLBACK:  # whose products depend on the batch in the last bit
                assert [a.tokens for a in found.values()] == [a.tokens for a in expected.values()], label
            else:
                assert found == expected, label
        stats = core.scheduler.stats()
        assert stats.window_tokens == window.tokens == stats.free_window_tokens + stats.idle_window_tokens
        assert (stats.cached_tokens > 0) == (kv.get("cache") != "none")
        core.close()
