"""Attention kernels against float64: rows of every kind, shared and scattered locs, poisoned cells and outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.plan import SharedPrefix, first_seen
from bough.device.attention import work as planning
from bough.device.attention.work import HostBatch, Tiles, most_work, plan_work
from bough.device.ops.cells import QuantizedCells, read_cells
from bough.device.ops.heads import Scoring
from bough.device.ops.registry import Ops
from bough.device.ops.triton import attention

from ..cases import Case, exact_attention, make_case, make_groups, sub_batch, tolerance
from .conftest import DEVICE

Tensor = torch.Tensor
SPLIT = planning.SPLIT


def there(value: Any) -> Any:
    """The tensors of ``value`` where the kernels run."""
    if isinstance(value, QuantizedCells):
        return QuantizedCells(value.data.to(DEVICE), value.scale.to(DEVICE))
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def run(ops: Ops, case: Case, groups: Any = None) -> Tensor:
    if groups is not None:
        groups = replace(groups, start=there(groups.start), rows=there(groups.rows), tokens=there(groups.tokens))
    return ops.paged_attention(*(there(a) for a in case.args), groups).cpu()


def close(out: Tensor, case: Case) -> None:
    assert out.isfinite().all()
    assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()


BATCHES = [
    ([1, 37, 100], [1, 1, 1]),
    ([SPLIT - 1, SPLIT, SPLIT + 1], [1, 1, 1]),
    ([5, 90, 300], [5, 1, 90]),
    ([3 * SPLIT + 1, 64, 65], [3, 64, 65]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", range(len(BATCHES)))
def test_rows_of_every_kind(ops: Ops, batch: int, dtype: torch.dtype) -> None:
    lengths, new = BATCHES[batch]
    case = make_case(lengths, new, (4, 2, 32), dtype, seed=batch)
    close(run(ops, case), case)


@pytest.mark.parametrize("heads", [(2, 2, 64), (3, 1, 64), (8, 1, 16), (6, 2, 24), (5, 1, 80), (20, 1, 16)], ids=str)
def test_groups_of_heads_and_dimensions(ops: Ops, heads: tuple[int, int, int]) -> None:
    case = make_case([70, 9, 40], [33, 1, 7], heads, torch.float32)
    close(run(ops, case), case)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32, torch.int8], ids=str)
def test_cells_of_other_dtypes(ops: Ops, kv_dtype: torch.dtype) -> None:
    case = make_case([70, 300], [33, 1], (4, 2, 32), torch.bfloat16, kv_dtype=kv_dtype)
    close(run(ops, case), case)


def test_cells_of_8_bit_floats(ops: Ops) -> None:
    case = make_case([70, 300], [33, 1], (4, 2, 32), torch.bfloat16)
    case = replace(case, k=case.k.to(torch.float8_e4m3fn), v=case.v.to(torch.float8_e4m3fn))
    close(run(ops, case), case)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages(ops: Ops, page_size: int) -> None:
    case = make_case([31, 33, 16], [1, 33, 16], (4, 2, 32), torch.float32, page_size=page_size)
    close(run(ops, case), case)


def test_shared_prefixes_are_read_once(ops: Ops) -> None:
    shared = 2 * SPLIT + 3
    case = make_case([shared + n for n in (1, 40, 300, 9)], [1, 1, 4, 1], (4, 2, 32), torch.float32, shared=shared)
    groups = make_groups(([0, 1, 2, 3], shared))
    close(run(ops, case, groups), case)
    # One row computes too much of its own to take part, and one is in another group.
    case = make_case([shared + n for n in (1, 40, 300, 9)], [1, 40, 1, 1], (4, 2, 32), torch.float32, shared=shared)
    close(run(ops, case, make_groups(([0, 1, 2], shared), ([3], shared))), case)


def test_what_a_row_gets_does_not_depend_on_company(ops: Ops) -> None:
    case = make_case([2 * SPLIT, 37, 300], [2, 1, 40], (4, 2, 32), torch.float32)
    whole = run(ops, case)
    for i in range(3):
        first, last = int(case.q_start[i]), int(case.q_start[i + 1])
        alone = run(ops, sub_batch(case, [(i, 0, last - first)]))
        assert torch.equal(alone, whole[first:last])


def exact_with(case: Case, window: int, chunked: bool, softcap: float, sinks: Tensor | None) -> Tensor:
    """float64, with the options of a layer."""
    outs = []
    for i, row in enumerate(case.rows.tolist()):
        length = int(case.seq_len[i])
        q = case.q[case.q_start[i] : case.q_start[i + 1]].double()
        group = q.shape[1] // case.k.shape[1]
        locs = case.page_table[row, :length].long()
        k, v = (read_cells(cells, locs).double().repeat_interleave(group, dim=1) for cells in (case.k, case.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.scoring.scale
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        at, keys = torch.arange(length - len(q), length)[:, None], torch.arange(length)
        first = at // window * window if chunked else at - window + 1 if window else 0 * at
        hidden = (keys > at) | (keys < first)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v))
    return torch.cat(outs)


@pytest.mark.parametrize(
    ("window", "chunked"), [(0, False), (1, False), (70, False), (400, False), (1, True), (70, True), (256, True)]
)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, True), (5.0, False), (5.0, True)])
def test_options_of_layers(window: int, chunked: bool, softcap: float, with_sinks: bool) -> None:
    case = make_case([3 * SPLIT, 65, 300], [2, 1, 90], (4, 2, 32), torch.float32)
    sinks = torch.randn(4) if with_sinks else None
    tiles = attention.tiles_of(4, 2, 32, torch.float32)
    batch = HostBatch(*(t.numpy() for t in (case.rows, case.q_start, case.seq_len)))
    work = plan_work(batch, tiles, window, chunked)
    out = attention.attend(
        *(there(x) for x in (case.q, case.k, case.v, case.page_table, torch.from_numpy(work.array))), work.sizes,
        Scoring(case.scoring.scale, softcap, window, there(sinks), chunked),
    ).cpu()  # fmt: skip
    assert (out.double() - exact_with(case, window, chunked, softcap, sinks)).abs().max() < 5e-6


def covered(batch: HostBatch, tiles: Tiles, window: int, chunked: bool) -> dict[int, list[tuple[int, int]]]:
    """Token -> the ranges of keys that the items of the plan give it, checked for what holds of every plan."""
    work = plan_work(batch, tiles, window, chunked)
    array, sizes = work.array, work.sizes
    assert array.dtype == np.int32
    n_small, n_large, n_merged, *at = array[: planning.HEADER].tolist()
    assert sizes == (n_small, n_large, n_merged, len(array) - at[6])
    order, positions = array[at[2] : at[3]], array[at[3] : at[4]]
    found: dict[int, list[tuple[int, int]]] = {}
    partial_of: dict[int, tuple[int, int]] = {}
    for begin, n, most in ((at[0], n_small, tiles.small), (at[1], n_large, tiles.large)):
        for row, first, count, key, end, partial in array[begin : begin + 6 * n].reshape(-1, 6).tolist():
            assert 1 <= count <= most and key < end and key % SPLIT == 0
            for j in range(count):
                token = int(order[first + j])
                found.setdefault(token, []).append((key, end))
                i = int(np.searchsorted(batch.q_start, token, side="right")) - 1
                assert positions[first + j] == batch.seq_len[i] - batch.q_start[i + 1] + token
                if partial >= 0:
                    assert partial + j not in partial_of
                    partial_of[partial + j] = token, key
                else:
                    assert row == batch.rows[i]
    merged, starts, partials = array[at[4] : at[5]], array[at[5] : at[6]], array[at[6] :]
    assert sorted(partial_of) == sorted(partials.tolist()) == list(range(sizes.partials))
    for i, token in enumerate(merged.tolist()):
        mine = [partial_of[p] for p in partials[starts[i] : starts[i + 1]].tolist()]
        assert all(t == token for t, _ in mine) and mine == sorted(mine)
        assert len(mine) == len(found[token])
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_plan_covers_every_key_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 12))
    n_new = np.where(rng.random(n) < 0.5, 1, rng.integers(1, 200, n)).astype(np.int32)
    start = rng.integers(0, 30 * SPLIT, n).astype(np.int32)
    q_start = np.concatenate(([0], np.cumsum(n_new))).astype(np.int32)
    rows = rng.permutation(50)[:n].astype(np.int32)
    shared = []
    if n > 3:
        members = np.sort(rng.permutation(n)[:3]).astype(np.int32)
        if common := int(start[members].min()):
            shared.append(SharedPrefix(members, common))
    batch = HostBatch(rows, q_start, start + n_new, tuple(shared))
    window, chunked = int(rng.choice([0, 0, 1, 100, 1000])), bool(rng.random() < 0.3)
    for token, ranges in covered(batch, Tiles(4, 32), window, chunked).items():
        i = int(np.searchsorted(q_start, token, side="right")) - 1
        position = int(start[i]) + token - int(q_start[i])
        ranges.sort()
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:]))
        assert ranges[-1][1] > position
        assert ranges[0][0] <= (max(0, first_seen(position, window, chunked)) if window else 0)


@pytest.mark.parametrize("tiles", [Tiles(4, 32), Tiles(1, 2), Tiles(1, 1)])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 64])
def test_the_bounds_hold_for_every_step_of_decodes(n: int, tiles: Tiles) -> None:
    sizes, length = most_work(n)
    rng = np.random.default_rng(n)
    for longest in (1, 300, 100_000):
        lengths = rng.integers(1, longest + 1, n).astype(np.int32)
        groups = [()]
        if longest > 300:
            lengths[:] = longest
            groups += [
                tuple(
                    SharedPrefix(np.arange(first, min(first + size, n), dtype=np.int32), longest - 1)
                    for first in range(0, n, size)
                )
                for size in (2, 3, n)
            ]
        for shared in groups:
            batch = HostBatch(np.arange(n, dtype=np.int32), np.arange(n + 1, dtype=np.int32), lengths, shared)
            work = plan_work(batch, tiles)
            assert len(work.array) <= length
            assert all(a <= b for a, b in zip(work.sizes, sizes))
