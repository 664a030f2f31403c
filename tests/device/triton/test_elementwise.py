"""Norms, activation, rotary positions and rounding against float64 and the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.device.ops.cells import QuantizedCells, read_cells
from bough.device.ops.heads import HeadNorm, Heads
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops

from ..cases import empty_cells
from ..exact import close, exact_norm, randn
from .conftest import DEVICE
from .test_attention import there

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
REFERENCE = ReferenceOps("the twin")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 64), (5, 7), (4, 1000)], ids=str)
def test_norms(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype, seed=1)
    close(loosely(ops.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5)), exact_norm(x, weight, 1e-5), 2)
    wide = weight.float()
    close(loosely(ops.rms_norm(x.to(DEVICE), wide.to(DEVICE), 1e-5)), exact_norm(x, wide, 1e-5), 2)
    residual = randn(*shape, dtype=dtype, seed=2)
    added, mine = x + residual, residual.to(DEVICE)
    out = ops.add_rms_norm(x.to(DEVICE), mine, weight.to(DEVICE), 1e-6)
    assert torch.equal(mine.cpu(), added), "the residual stream is changed in place"
    close(loosely(out), exact_norm(added, weight, 1e-6), 2)


def loosely(out: torch.Tensor) -> torch.Tensor:
    """On the host; float16 as bfloat16, whose tolerance it keeps by far."""
    return out.cpu().bfloat16() if out.dtype == torch.float16 else out.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 576), (3, 1536), (5, 7)], ids=str)
def test_silu_mul(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, dim = shape
    x = randn(n, 2 * dim, dtype=dtype) * (2 if dtype == torch.float16 else 20)
    gate, up = x.double().chunk(2, -1)
    close(loosely(ops.silu_mul(x.to(DEVICE))), torch.nn.functional.silu(gate) * up, 3)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert torch.allclose(ops.gelu_mul(x.to(DEVICE)).cpu().double(), exact, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (24, 10), (16, 0)])
def test_rope_kv_write(ops: Ops, dim: int, rotary: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    n, heads, kv_heads = 5, 14, 2
    qkv = randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype) * 3
    qkv.view(n, -1, dim)[1, -1] = 0.0
    qkv.view(n, -1, dim)[2, -1, 3] = torch.nan
    angles = randn(50, rotary // 2, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions, out_loc = torch.randperm(50)[:n].int(), torch.randperm(30)[:n].int()

    def cells() -> list[torch.Tensor | QuantizedCells]:
        if kv_dtype == torch.float8_e4m3fn:
            return [torch.full((30, kv_heads, dim), torch.nan).to(kv_dtype) for _ in "kv"]
        return [empty_cells(30, kv_heads, dim, kv_dtype) for _ in "kv"]

    expected, mine = cells(), [there(c) for c in cells()]
    norm = HeadNorm(randn(dim, seed=3).to(dtype), randn(dim, seed=4).to(dtype), 1e-5) if dim == 80 else None
    shape = Heads(heads, kv_heads, dim, interleaved=dim == 24, norm=norm)
    wanted = REFERENCE.rope_kv_write(qkv, table, positions, out_loc, *expected, shape)
    if norm is not None:
        shape = replace(shape, norm=HeadNorm(norm.q.to(DEVICE), norm.k.to(DEVICE), norm.eps))
    q = ops.rope_kv_write(*(there(t) for t in (qkv, table, positions, out_loc)), *mine, shape)
    close(loosely(q), wanted.double())
    everywhere = torch.arange(30)
    unit = {torch.int8: 2**-5, torch.float8_e4m3fn: 2**-3}.get(kv_dtype, 2**-7)
    for found, right in zip(mine, expected):
        a, b = read_cells(there_back(found), everywhere), read_cells(right, everywhere)
        assert torch.equal(a.isnan(), b.isnan()), "no other cell is touched"
        # Where the reference rounds the other way, one step of what the cells hold.
        top = b.nan_to_num().abs().amax(-1, keepdim=True) if kv_dtype == torch.int8 else b.nan_to_num().abs()
        assert ((a - b).nan_to_num().abs() <= unit * top + 1e-5).all()
        assert ((a - b).nan_to_num() != 0).float().mean() < (0.01 if norm is None else 0.2)


def there_back(cells: torch.Tensor | QuantizedCells) -> torch.Tensor | QuantizedCells:
    if isinstance(cells, QuantizedCells):
        return QuantizedCells(cells.data.cpu(), cells.scale.cpu())
    return cells.cpu()
