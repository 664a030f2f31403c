"""Attention problems over a shuffled pool, and their answers in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bough.device.ops.cells import Cells, QuantizedCells, read_cells, write_cells
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Scoring

Tensor = torch.Tensor

MISSING = 2**30
"""Fills the page table where nothing may be read: a kernel that does reads far outside the pool."""


@dataclass
class Case:
    """Arguments of one call of paged attention; ``args`` in the order of the op."""

    q: Tensor
    k: Cells
    v: Cells
    page_table: Tensor
    rows: Tensor
    q_start: Tensor
    seq_len: Tensor
    scoring: Scoring

    @property
    def args(self) -> tuple[Tensor, Cells, Cells, Tensor, Tensor, Tensor, Tensor, Scoring]:
        return self.q, self.k, self.v, self.page_table, self.rows, self.q_start, self.seq_len, self.scoring


def make_case(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int = 0,
    shared: int = 0,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 1,
    softcap: float = 0.0,
    window: int = 0,
    sinks: bool = False,
) -> Case:
    """Sequences of ``lengths`` of which the last ``new`` tokens are computed; ``heads`` is (H, KH, D).

    The first ``shared`` positions of all sequences are the same cells. Cells that no sequence owns hold NaN, or the
    largest integers with a scale of NaN; ``kv_dtype`` is that of the queries unless it is given. Nor may anything be
    read that lies before the ``window`` of a sequence's first query.
    """
    n_heads, n_kv_heads, dim = heads
    g = torch.Generator().manual_seed(seed)
    n_pages = sum(-(-n // page_size) for n in lengths) + 5
    # The first page is nobody's: a kernel that reads cell 0 for what it masks shows.
    pages = 1 + torch.randperm(n_pages - 1, generator=g)
    n_rows = len(lengths) + 3
    table = torch.full((n_rows, max(lengths) + 5), MISSING, dtype=torch.int32)
    rows = torch.randperm(n_rows, generator=g)[: len(lengths)].int()
    used, owned, first_row = 0, [], rows[0]
    for row, length in zip(rows.tolist(), lengths):
        count = -(-length // page_size)
        locs = (pages[used : used + count, None] * page_size + torch.arange(page_size)).flatten()[:length]
        used += count
        common = min(shared, length, lengths[0])
        table[row, :length] = locs
        table[row, :common] = table[first_row, :common]
        owned.append(locs)
    where = torch.cat(owned)
    k, v = (empty_cells(n_pages * page_size, n_kv_heads, dim, kv_dtype or dtype) for _ in range(2))
    for cells in (k, v):
        write_cells(cells, where, torch.randn((len(where), n_kv_heads, dim), generator=g).to(dtype))
    q = torch.randn((sum(new), n_heads, dim), generator=g).to(dtype)
    q_start = torch.tensor([0, *new]).cumsum(0).int()
    for row, length, n in zip(rows.tolist(), lengths, new):
        table[row, : max(0, length - n - window + 1) if window else 0] = MISSING
    scoring = Scoring(
        dim**-0.5 * (2.0 if softcap else 1.0), softcap, window, torch.randn(n_heads, generator=g) * 2 if sinks else None
    )
    return Case(q, k, v, table, rows, q_start, torch.tensor(lengths).int(), scoring)


def empty_cells(n_cells: int, n_kv_heads: int, dim: int, dtype: torch.dtype) -> Cells:
    """Cells nobody has written: whatever is made of them is not a number."""
    if dtype == torch.int8:
        data = torch.full((n_cells, n_kv_heads, dim), 127, dtype=dtype)
        return QuantizedCells(data, torch.full((n_cells, n_kv_heads), torch.nan))
    return torch.full((n_cells, n_kv_heads, dim), torch.nan, dtype=dtype)


def make_groups(*groups: tuple[list[int], int]) -> SharedGroups:
    """Groups of (batch indices, tokens)."""
    start = torch.tensor([0, *(len(rows) for rows, _ in groups)]).cumsum(0).int()
    rows = torch.tensor([row for rows, _ in groups for row in rows], dtype=torch.int32)
    return SharedGroups(start, rows, torch.tensor([n for _, n in groups], dtype=torch.int32))


def exact_attention(case: Case) -> Tensor:
    """[T, H, D] float64 by one softmax over all keys, from what the cells hold."""
    return _attention(case)[0]


def tolerance(case: Case) -> Tensor:
    """How far a result in the dtype of the queries may be from the exact one, element by element.

    float32: rounding of sums. bfloat16: half a unit in the last place of the result, and of every weight.
    """
    exact, spread = _attention(case)
    if case.q.dtype == torch.float32:
        return 2e-6 + 2e-6 * spread
    return 2**-8 * exact.abs() + 2**-8 * spread + 1e-5


def _attention(case: Case) -> tuple[Tensor, Tensor]:
    """The result, and the same with magnitudes of the values: what errors of the weights are relative to."""
    outs, spreads = [], []
    for i, row in enumerate(case.rows.tolist()):
        length = int(case.seq_len[i])
        q = case.q[case.q_start[i] : case.q_start[i + 1]].double()
        how = case.scoring
        first = max(0, length - len(q) - how.window + 1) if how.window else 0
        locs = case.page_table[row, first:length].long()
        group = q.shape[1] // case.k.shape[1]
        k, v = (read_cells(cells, locs).double().repeat_interleave(group, dim=1) for cells in (case.k, case.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * how.scale
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        positions, keys = torch.arange(length - len(q), length)[:, None], torch.arange(first, length)
        hidden = (keys > positions) | (keys <= positions - how.window if how.window else keys < 0)
        scores = scores.masked_fill(hidden, -torch.inf)
        if how.sinks is not None:
            beside = how.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, beside), dim=-1)
        weights = scores.softmax(-1)[..., : len(keys)]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        spreads.append(torch.einsum("hqk,khd->qhd", weights, v.abs()))
    return torch.cat(outs), torch.cat(spreads)


def sub_batch(case: Case, picks: list[tuple[int, int, int]]) -> Case:
    """The case with only tokens [begin, end) of some rows: (batch row, begin, end), begin and end within the row."""
    q, new, lengths, rows = [], [], [], []
    for i, begin, end in picks:
        first = int(case.q_start[i])
        q.append(case.q[first + begin : first + end])
        new.append(end - begin)
        n_new = int(case.q_start[i + 1]) - first
        lengths.append(int(case.seq_len[i]) - n_new + end)
        rows.append(int(case.rows[i]))
    ints = [torch.tensor(x, dtype=torch.int32) for x in (rows, [0, *torch.tensor(new).cumsum(0).tolist()], lengths)]
    return replace(case, q=torch.cat(q), rows=ints[0], q_start=ints[1], seq_len=ints[2])
