"""Tiny checkpoints, and drivers of workers on them."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.params import SamplingParams
from tests import driving
from tests.driving import GREEDY, Driver


@pytest.fixture
def make_driver() -> Callable[..., Driver]:
    """path -> a driver of a fresh worker on that checkpoint."""
    return driving.make_driver


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """config options -> (folder, transformers model in float32), random weights, made once per set of options."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(**options: Any) -> tuple[Path, Any]:
        from transformers import LlamaConfig, LlamaForCausalLM

        key = repr(sorted(options.items()))
        if key not in made:
            config = LlamaConfig(
                **{
                    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
                    "initializer_range": 0.25, **options,
                }
            )  # fmt: skip
            torch.manual_seed(zlib.crc32(key.encode()))
            model = LlamaForCausalLM(config).eval()
            for name, value in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    torch.nn.init.normal_(value, 1.0 if "norm" in name else 0.0, 0.2)
            folder = tmp_path_factory.mktemp("llama")
            model.save_pretrained(folder)
            made[key] = folder, model
        return made[key]

    return make


@pytest.fixture(scope="session")
def greedy() -> SamplingParams:
    return GREEDY
