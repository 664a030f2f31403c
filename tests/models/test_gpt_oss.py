"""gpt-oss with its experts as they are published: MXFP4 in blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.base.errors import ConfigError
from bough.device.ops.packed import Kind, unpack
from bough.device.quant.mxfp4 import MxFp4
from tests.driving import make_driver
from tests.models.parity import CASES, WHOLE, check, distance, ids_of, make_checkpoint

Tensor = torch.Tensor

CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def random_blocks(*shape: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [..., G, 16], exponents uint8 [..., G], and the values [..., 32 G] by the format's definition."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape, 16), generator=g, dtype=torch.uint8)
    exponents = torch.randint(121, 126, shape, generator=g, dtype=torch.uint8)
    low, high = (torch.tensor(CODES)[part.long()] for part in (codes & 15, codes >> 4))
    values = torch.stack((low, high), dim=-1).flatten(-2) * 2.0 ** (exponents.float() - 127)[..., None]
    return codes, exponents, values.flatten(-2)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with MXFP4 experts, and transformers' model with their values."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    model = make_checkpoint(CASES["gpt_oss"], folder)
    weights = load_file(folder / "model.safetensors")
    parameters = dict(model.named_parameters())
    for i, name in enumerate([name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]):
        n_experts, n_in, n_out = weights.pop(name).shape
        codes, exponents, values = random_blocks(n_experts, n_out, n_in // 32, seed=i)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = codes, exponents
        parameters[name].data.copy_(values.transpose(1, 2))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_experts_in_mxfp4_equal_their_values(quantised: tuple[Path, Any], kernels: str) -> None:
    folder, model = quantised
    driver = make_driver(folder, kernels=kernels)
    seqs = [driver.add(row, ids_of(row, n), WHOLE) for row, n in enumerate((40, 7))]
    driver.run(seqs, 4, chunk=9)
    for seq in seqs:
        check(seq, model)


def test_the_kernels_keep_them_in_integers(quantised: tuple[Path, Any]) -> None:
    folder, model = quantised
    driver = make_driver(folder, kernels="auto", dtype=torch.bfloat16)
    seq = driver.add(0, ids_of(2, 40), WHOLE)
    driver.run([seq], 3)
    assert distance(seq, model) < 0.2  # wider than the bound of parity, because each of the two chooses its own experts


def test_blocks_are_repacked_without_a_change() -> None:
    codes, exponents, values = random_blocks(48, 4, seed=3)
    codes[5, 1], exponents[5, 1] = 0x80, 0  # zeros, whose exponent means nothing
    values.view(48, 4, 32)[5, 1] = 0
    held = MxFp4(codes, exponents, torch.float32)
    assert torch.equal(held.dense(), values)
    packed = held.blocks()
    assert packed is not None and packed.kind == Kind.Q8 and torch.equal(unpack(packed), values)
    for extreme in (1, 250):
        exponents[7, 2] = extreme
        assert MxFp4(codes, exponents, torch.float32).blocks() is None


def test_other_blocks_are_refused(quantised: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = quantised
    weights = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    name = next(name for name in weights if name.endswith("gate_up_proj_scales"))
    for wrong in (weights[name].int(), weights[name][:, :-1].contiguous()):
        save_file({**weights, name: wrong}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError):
            make_driver(tmp_path)
