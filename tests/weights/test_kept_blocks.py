"""Blocks that are multiplied as a GGUF file holds them have the very values that decoding gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from bough.device.ops.packed import unpack
from bough.device.quant.base import Blocks
from bough.device.quant.blocks import PACKERS
from bough.weights.formats import FORMATS
from bough.weights.loader import open_checkpoint

BY_NAME = {fmt.name: fmt for fmt in FORMATS.values()}


@pytest.mark.parametrize("name", PACKERS)
@pytest.mark.parametrize("n_out", [1, 16, 37])
def test_values_are_those_of_the_decoder(name: str, n_out: int) -> None:
    fmt = BY_NAME[name]
    random = np.random.default_rng(n_out)
    data = random.integers(0, 256, (n_out * 3, fmt.layout.itemsize), dtype=np.uint8)
    blocks = data.reshape(-1).view(fmt.layout)
    for field in ("d", "m", "dmin"):
        if field in (fmt.layout.names or ()):
            blocks[field] = random.normal(size=len(blocks)).astype(np.float16)
    if name == "MXFP4":
        blocks["e"] = random.integers(112, 140, len(blocks), dtype=np.uint8)
    expected = torch.from_numpy(fmt.decode(blocks).reshape(n_out, -1).astype(np.float32))
    rows = torch.from_numpy(data.reshape(n_out, -1))
    packed = PACKERS[name](Blocks(name, rows, 3 * fmt.values))
    assert packed is not None and torch.equal(unpack(packed), expected)


def test_scales_that_no_kernel_holds_are_left_to_the_decoder() -> None:
    rows = torch.tensor([[250, *range(16)]], dtype=torch.uint8)
    assert PACKERS["MXFP4"](Blocks("MXFP4", rows, 32)) is None


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "F16"])
def test_the_loader_gives_blocks_in_the_order_of_the_model(
    llama_folder: Path, write_gguf: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", quantise=gguf.GGMLQuantizationType[kind]))
    for name in checkpoint.names():
        blocks, decoded = checkpoint.blocks(name), checkpoint.tensor(name)
        if decoded.ndim == 1 or kind == "F16":
            assert blocks is None
            continue
        assert blocks is not None and blocks.format == kind and blocks.n_in == decoded.shape[1]
        if kind in PACKERS:
            packed = PACKERS[kind](blocks)
            assert packed is not None and torch.equal(unpack(packed), decoded), "query and key rows are restored, too"
    checkpoint.close()


def test_a_folder_has_no_blocks(llama_folder: Path) -> None:
    checkpoint = open_checkpoint(llama_folder)
    assert all(checkpoint.blocks(name) is None for name in checkpoint.names())
