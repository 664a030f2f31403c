"""Paged attention against float64, and its independence of everything that is not a row's own."""

from __future__ import annotations

import pytest
import torch

from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.ops.registry import Ops

from .cases import Case, exact_attention, make_case

Tensor = torch.Tensor

HEADS = [(4, 4, 32), (9, 3, 64), (8, 1, 80), (4, 2, 96), (16, 2, 128), (7, 1, 64)]
BOUNDARIES = [1, 63, 64, 65, 255, 256, 257, 511, 512, 513]
DTYPES = [torch.float32, torch.bfloat16]


def check(ops: Ops, case: Case) -> None:
    out, exact = ops.paged_attention(*case.args), exact_attention(case)
    assert out.dtype == case.q.dtype
    assert out.isfinite().all()
    # bfloat16: half a unit of the last place of the result, and of the products before it.
    error = (out.double() - exact).abs()
    bound = 2e-6 if out.dtype == torch.float32 else 1e-3 + exact.abs() * 2**-8
    assert (error <= bound).all(), error.max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_equals_float64(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(ops, make_case(BOUNDARIES, [1] * len(BOUNDARIES), heads, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mixed_batches_equal_float64(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths, new = [65, 1, 300, 64, 513, 700, 40], [65, 1, 1, 7, 130, 2, 33]
    check(ops, make_case(lengths, new, heads, dtype, shared=36))


@pytest.mark.parametrize("new", [1, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_row_equals_float64(ops: Ops, dtype: torch.dtype, new: int) -> None:
    check(ops, make_case([2000], [new], (9, 3, 64), dtype))


def test_large_scores_do_not_overflow(ops: Ops) -> None:
    case = make_case([300], [20], (4, 2, 64), torch.float32)
    case.q *= 1000
    out = ops.paged_attention(*case.args)
    assert torch.allclose(out.double(), exact_attention(case), atol=5e-3)


def test_a_nan_stays_in_its_row(ops: Ops) -> None:
    case = make_case([70, 90], [3, 3], (4, 2, 32), torch.float32)
    clean = ops.paged_attention(*case.args)
    case.k[case.page_table[case.rows[0], 5].long()] = torch.nan
    out = ops.paged_attention(*case.args)
    assert out[:3].isnan().all(), "a broken row has to show"
    assert torch.equal(out[3:], clean[3:])


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
    ints = (torch.tensor(x, dtype=torch.int32) for x in (rows, [0, *torch.tensor(new).cumsum(0).tolist()], lengths))
    return Case(torch.cat(q), case.k, case.v, case.page_table, *ints, case.scale)


# The compiled kernels promise it for bfloat16, too; so does the reference, which computes in float32.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_depend_on_the_row_alone(ops: Ops, dtype: torch.dtype, threads: int) -> None:
    lengths, new = [700, 90, 300, 1, 600], [130, 90, 1, 1, 40]
    case = make_case(lengths, new, (9, 3, 64), dtype)
    whole = ops.paged_attention(*case.args)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for i, n in enumerate(new):
            first = int(case.q_start[i])
            alone = ops.paged_attention(*sub_batch(case, [(i, 0, n)]).args)
            assert torch.equal(alone, whole[first : first + n])
        for begin, end in [(0, 1), (0, 50), (50, 51), (51, 53), (53, 130), (129, 130)]:
            company = [(4, 0, 7), (0, begin, end), (1, 80, 90)]
            part = ops.paged_attention(*sub_batch(case, company).args)
            assert torch.equal(part[7 : 7 + end - begin], whole[begin:end])
    finally:
        torch.set_num_threads(before)


def test_odd_head_dimensions_work(ops: Ops) -> None:
    check(ops, make_case([70, 5], [1, 5], (4, 2, 24), torch.float32))


def test_the_backend_passes_its_plan_on(ops: Ops) -> None:
    case = make_case([70, 5], [1, 5], (4, 2, 32), torch.float32)
    positions = torch.tensor([69, 0, 1, 2, 3, 4], dtype=torch.int32)
    owner = case.rows.repeat_interleave(torch.tensor([1, 5])).long()
    out_loc = case.page_table[owner, positions.long()]
    backend = PagedAttention(ops)
    with pytest.raises(RuntimeError, match="plan"):
        backend.forward(case.q, case.k, case.v, case.scale)
    backend.plan(AttentionBatch(case.page_table, case.rows, case.q_start, case.seq_len, positions, out_loc))
    qkv, table = torch.randn(6, 8 * 32), torch.randn(80, 32)
    q = backend.write(qkv, table, case.k, case.v, 4)
    assert torch.equal(case.v[out_loc.long()], qkv[:, -64:].view(6, 2, 32))
    expected = exact_attention(Case(q, case.k, case.v, *case.args[3:]))
    assert torch.allclose(backend.forward(q, case.k, case.v, case.scale).double(), expected, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("torch itself refuses them")
    case = make_case([70, 5], [1, 5], (4, 2, 32), torch.float32)
    with pytest.raises(ValueError, match="int32"):
        ops.paged_attention(*case.args[:4], case.rows.long(), *case.args[5:])
    with pytest.raises(ValueError, match="dtype"):
        ops.paged_attention(case.q.bfloat16(), *case.args[1:])
    with pytest.raises(ValueError, match="contiguous"):
        ops.paged_attention(case.q.transpose(0, 1).contiguous().transpose(0, 1), *case.args[1:])
    with pytest.raises(ValueError, match="paged_attention"):
        ops.paged_attention(*case.args[:5], case.q_start[:-1], *case.args[6:])
