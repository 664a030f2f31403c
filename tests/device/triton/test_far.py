"""Cells and tables so large that an index times its size takes more than 32 bits.

The memory is only asked for, not used, where it is the host's: but for the few cells that are written, no page of it is
there. What is tested lies in the middle of it, so that a product which overflows finds zeros. A device gives it, so
there it is no larger than it has to be: an overflow is an illegal access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bough.device.ops.heads import Heads
from bough.device.ops.registry import Ops

from ..cases import Case, exact_attention, make_case, tolerance
from .conftest import DEVICE

Tensor = torch.Tensor

FAR = 1 << 31

NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which Python 3.11 has no name for."""


def lazily(n: int, dtype: torch.dtype) -> Tensor:
    """[n], all zero; on the host as much lies before it, for a product that overflows."""
    if DEVICE.type == "cuda":
        return torch.zeros(n, dtype=dtype, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, 2 * n * dtype.itemsize, flags=flags), dtype=dtype)[n:]


def far_cells(case: Case, v_is_k: bool = False) -> Case:
    """The same, where the cells are the last ones of pools that end beyond 2^31 numbers; queries in float32."""
    n, *shape = case.k.shape
    size = n * case.k[0].numel()
    first = FAR // case.k[0].numel()
    memory = lazily(FAR + 2 * size, torch.bfloat16)
    k = memory[: FAR + size].view(-1, *shape)
    v = k if v_is_k else memory[size : FAR + 2 * size].view(-1, *shape)
    k[first:], v[first:] = case.k, case.k if v_is_k else case.v
    table = torch.where(case.page_table < n, case.page_table + first, case.page_table)
    return replace(case, k=k, v=v, page_table=table.int())


def answers(ops: Ops, case: Case) -> Tensor:
    k = case.k.to(DEVICE)
    rest = (case.page_table, case.rows, case.q_start, case.seq_len)
    v = k if case.v is case.k else case.v.to(DEVICE)
    return ops.paged_attention(case.q.to(DEVICE), k, v, *(t.to(DEVICE) for t in rest), case.scoring).cpu()


@pytest.fixture(params=[False, True], ids=["attention", "latents"])
def near(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Rows of one and of several tokens; with latents, the keys are the values."""
    case = make_case([5, 70], [1, 33], (16, 1, 16) if request.param else (4, 2, 32), torch.bfloat16)
    yield replace(case, v=case.k) if request.param else case


def test_cells_far_from_the_first(ops: Ops, near: Case) -> None:
    far = far_cells(near, near.v is near.k)
    assert ((answers(ops, far).double() - exact_attention(near)).abs() <= tolerance(near)).all()


def test_rows_far_from_the_first(ops: Ops, near: Case) -> None:
    stride = (1 << 30) + 16
    rows = torch.tensor([0, 2], dtype=near.rows.dtype)
    assert int(rows.max()) * stride >= FAR
    width = near.page_table.shape[1]
    memory = lazily(2 * stride + width, torch.int32)
    table = memory.as_strided((3, width), (stride, 1))
    table[rows.long()] = near.page_table[near.rows.long()].to(DEVICE)
    far = answers(ops, replace(near, page_table=table, rows=rows)).double()
    assert ((far - exact_attention(near)).abs() <= tolerance(near)).all()


def test_what_is_written_far_from_the_first(ops: Ops) -> None:
    n, heads = 3, Heads(2, 1, 16)
    first = FAR // heads.dim
    memory = lazily(FAR + 64 * heads.dim, torch.bfloat16)
    k = memory[: FAR + 32 * heads.dim].view(-1, 1, heads.dim)
    v = memory[32 * heads.dim :].view(-1, 1, heads.dim)
    qkv = torch.randn(n, 4 * heads.dim).bfloat16().to(DEVICE)
    table, at = torch.zeros(4, heads.dim, device=DEVICE), torch.arange(n, device=DEVICE).int()
    table[:, : heads.dim // 2] = 1.0  # nothing is turned
    ops.rope_kv_write(qkv, table, at, at + first + 1, k, v, heads)
    assert torch.equal(k[first + 1 : first + 1 + n].flatten(1), qkv[:, 2 * heads.dim : 3 * heads.dim])
    assert torch.equal(v[first + 1 : first + 1 + n].flatten(1), qkv[:, 3 * heads.dim :])
