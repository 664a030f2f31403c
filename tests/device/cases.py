"""Attention problems over a shuffled pool, and their answers in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

MISSING = 2**30
"""Fills the page table where nothing may be read: a kernel that does reads far outside the pool."""


@dataclass
class Case:
    """Arguments of one call of paged attention; ``args`` in the order of the op."""

    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor
    rows: Tensor
    q_start: Tensor
    seq_len: Tensor
    scale: float

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        return self.q, self.k, self.v, self.page_table, self.rows, self.q_start, self.seq_len, self.scale


def make_case(
    lengths: list[int],
    new: list[int],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    seed: int = 0,
    shared: int = 0,
) -> Case:
    """Sequences of ``lengths`` of which the last ``new`` tokens are computed; ``heads`` is (H, KH, D).

    The first ``shared`` positions of all sequences are the same cells. Cells that no sequence owns hold NaN.
    """
    n_heads, n_kv_heads, dim = heads
    g = torch.Generator().manual_seed(seed)
    n_cells = sum(lengths) + 37
    order = torch.randperm(n_cells, generator=g).int()
    n_rows = len(lengths) + 3
    table = torch.full((n_rows, max(lengths) + 5), MISSING, dtype=torch.int32)
    rows = torch.randperm(n_rows, generator=g)[: len(lengths)].int()
    used = 0
    for row, length in zip(rows.tolist(), lengths):
        table[row, :length] = order[used : used + length]
        used += length
        common = min(shared, length)
        table[row, :common] = order[:common]
    k = torch.full((n_cells, n_kv_heads, dim), torch.nan, dtype=dtype)
    v = k.clone()
    owned = order[:used].long()
    for cache in (k, v):
        cache[owned] = torch.randn((used, n_kv_heads, dim), generator=g).to(dtype)
    q = torch.randn((sum(new), n_heads, dim), generator=g).to(dtype)
    q_start = torch.tensor([0, *new]).cumsum(0).int()
    return Case(q, k, v, table, rows, q_start, torch.tensor(lengths).int(), dim**-0.5)


def exact_attention(case: Case) -> Tensor:
    """[T, H, D] float64 by one softmax over all keys."""
    outs = []
    for i, row in enumerate(case.rows.tolist()):
        length = int(case.seq_len[i])
        q = case.q[case.q_start[i] : case.q_start[i + 1]].double()
        locs = case.page_table[row, :length].long()
        group = q.shape[1] // case.k.shape[1]
        k, v = (cache[locs].double().repeat_interleave(group, dim=1) for cache in (case.k, case.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * case.scale
        positions = torch.arange(length - len(q), length)[:, None]
        scores = scores.masked_fill(torch.arange(length) > positions, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs)
