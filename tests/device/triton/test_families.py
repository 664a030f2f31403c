"""Models whose layers have kernels of their own, latents and experts, through Triton and its captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.driving import make_driver
from tests.models.parity import CASES, WHOLE, Case, check, ids_of, make_checkpoint

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


def test_what_runs_through_transformers_is_not_captured(tmp_path: Path) -> None:
    """What its layers ask the device for would end a capture."""
    model, how = make_checkpoint(Case("starcoder2"), tmp_path), capture()
    driver = make_driver(tmp_path, kernels="triton", n_rows=1, n_tokens=64, capture=how)
    seq = driver.add(0, ids_of(1, 5), WHOLE)
    driver.run([seq], 2)
    check(seq, model)
    assert not isinstance(how, Eager) or not how.replays
