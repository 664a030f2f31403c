"""Attention to latents, which are keys and values at once, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.device.attention.base import AttentionBatch
from bough.device.attention.triton import TritonAttention
from bough.device.attention.work import SPLIT
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Scoring
from bough.device.ops.registry import Ops
from bough.device.ops.triton.latent import tiles_of

from ..cases import Case, exact_attention, make_case, make_groups, tolerance
from .test_attention import there

BATCHES = [([1, 37, 100], [1, 1, 1]), ([SPLIT - 1, SPLIT, 2 * SPLIT + 1], [1, 1, 3]), ([5, 70], [5, 33])]


def latents(lengths: list[int], new: list[int], heads: tuple[int, int], dtype: torch.dtype, **options: object) -> Case:
    """A case of H heads over cells of D numbers."""
    case = make_case(lengths, new, (heads[0], 1, heads[1]), dtype, **options)
    return replace(case, v=case.k)


def close(ops: Ops, case: Case, groups: SharedGroups | None = None) -> None:
    q, cells, _, *others = (there(a) for a in case.args)
    if groups is not None:
        groups = SharedGroups(there(groups.start), there(groups.rows), there(groups.tokens))
    out = ops.paged_attention(q, cells, cells, *others, groups).cpu()
    assert out.isfinite().all()
    assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_rows_of_every_kind(ops: Ops, batch: int, dtype: torch.dtype) -> None:
    close(ops, latents(*BATCHES[batch], (16, 72), dtype, seed=batch))


@pytest.mark.parametrize("heads", [(3, 24), (20, 40), (128, 576), (70, 64)], ids=str)
def test_heads_and_sizes(ops: Ops, heads: tuple[int, int]) -> None:
    close(ops, latents([40, 9], [1, 2], heads, torch.float32))


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float16], ids=str)
def test_cells_of_other_dtypes(ops: Ops, kv_dtype: torch.dtype) -> None:
    close(ops, latents([70, 300], [33, 1], (16, 72), torch.bfloat16, kv_dtype=kv_dtype))


def test_shared_prefixes_are_read_once(ops: Ops) -> None:
    shared = SPLIT + 3
    case = latents([shared + n for n in (1, 40, 9)], [1, 1, 1], (16, 72), torch.float32, shared=shared)
    assert tiles_of(16).large > 1
    close(ops, case, make_groups(([0, 1, 2], shared)))


def test_the_backend_knows_them(ops: Ops) -> None:
    case = latents([300, 20], [1, 4], (16, 72), torch.float32)
    backend = TritonAttention(ops)
    table, rows, q_start, seq_len = (there(t) for t in (case.page_table, case.rows, case.q_start, case.seq_len))
    backend.plan(AttentionBatch(table, rows, q_start, seq_len, rows, rows))
    cells = there(case.k)
    out = backend.forward(there(case.q), cells, cells, case.scoring).cpu()
    assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()
    for scoring in (Scoring(1.0, softcap=2.0), Scoring(1.0, window=4), Scoring(1.0, sinks=torch.zeros(16))):
        with pytest.raises(ValueError, match="paged_attention"):
            backend.forward(there(case.q), cells, cells, scoring)
