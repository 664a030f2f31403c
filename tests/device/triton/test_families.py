"""Models whose layers have kernels of their own, latents and experts, through Triton and its captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.driving import make_driver
from tests.models.parity import CASES, WHOLE, check, ids_of, make_checkpoint

from .test_model import Eager, capture


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_a_family_through_triton_equals_transformers(name: str, tmp_path: Path) -> None:
    model, how = make_checkpoint(CASES[name], tmp_path), capture()
    driver = make_driver(
        tmp_path, dtype=torch.float32, kernels="triton", n_rows=2, n_tokens=200, context_length=64, capture=how
    )
    seqs = [driver.add(row, ids_of(row, n), WHOLE) for row, n in enumerate((14, 5))]
    driver.run(seqs, 4, chunk=9)
    for seq in seqs:
        check(seq, model)
    if isinstance(how, Eager):
        assert how.replays
