"""Decoding of ggml's block formats equals the ``gguf`` package's, bit for bit, on arbitrary bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from bough.weights.blocks import PIECE, decode_into
from bough.weights.formats import FORMATS


def oracle(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What the package decodes. Of Q1_0 it knows only the size: a half float and 128 signs, 1 for plus."""
    if kind.name != "Q1_0":
        return gguf.quants.dequantize(data, kind)
    scales = data[:, :2].copy().view(np.float16).astype(np.float32)
    return np.array([
        [scale if block[2 + i // 8] >> i % 8 & 1 else -scale for i in range(128)]
        for block, (scale,) in zip(data, scales)
    ])  # fmt: skip


@pytest.mark.parametrize("kind", list(FORMATS), ids=lambda k: FORMATS[k].name)
@pytest.mark.parametrize("n_blocks", [1, 3, 257])
def test_equals_the_oracle_on_random_bytes(kind: int, n_blocks: int) -> None:
    fmt = FORMATS[kind]
    random = np.random.default_rng(kind * 1000 + n_blocks)
    data = random.integers(0, 256, n_blocks * fmt.layout.itemsize, dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = oracle(data.reshape(n_blocks, -1), gguf.GGMLQuantizationType(kind))
    out = torch.empty(n_blocks * fmt.values)
    decode_into(out, data, fmt)
    np.testing.assert_array_equal(out.numpy(), expected.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("kind", list(FORMATS), ids=lambda k: FORMATS[k].name)
def test_sizes_are_those_of_the_format(kind: int) -> None:
    values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    fmt = FORMATS[kind]
    assert (fmt.values, fmt.layout.itemsize, fmt.name) == (values, nbytes, gguf.GGMLQuantizationType(kind).name)
    assert fmt.nbytes(4 * values) == 4 * nbytes


def test_a_part_of_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="whole Q4_0 blocks"):
        FORMATS[2].nbytes(33)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_pieces_join_without_a_seam(extra: int) -> None:
    fmt = FORMATS[8]
    n_blocks = 2 * PIECE // fmt.values + extra
    data = np.random.default_rng(extra + 1).integers(0, 100, n_blocks * fmt.layout.itemsize, dtype=np.uint8)
    whole = torch.empty(n_blocks * fmt.values)
    decode_into(whole, data, fmt)
    expected = torch.from_numpy(fmt.decode(data.view(fmt.layout)).reshape(-1))
    assert torch.equal(whole, expected)


def test_other_dtypes_are_rounded_once_from_float32() -> None:
    fmt = FORMATS[3]
    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1).reshape(-1)
    exact, rounded = torch.empty(8, 64), torch.empty(8, 64, dtype=torch.bfloat16)
    decode_into(exact, data, fmt)
    decode_into(rounded, data, fmt)
    assert torch.equal(rounded, exact.to(torch.bfloat16))
    assert np.abs(exact.numpy() - values).max() < 0.3
