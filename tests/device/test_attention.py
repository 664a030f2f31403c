"""Paged attention against float64, and its independence of everything that is not a row's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.ops.cells import QuantizedCells, read_cells
from bough.device.ops.cpu import _warn_of_heads
from bough.device.ops.heads import Heads
from bough.device.ops.registry import Ops

from .cases import Case, exact_attention, make_case, make_groups, sub_batch, tolerance

Tensor = torch.Tensor

HEADS = [
    (4, 4, 32), (9, 3, 64), (8, 1, 80), (4, 2, 96), (16, 2, 128), (7, 1, 64), (2, 2, 256),
    (24, 2, 32), (26, 2, 32), (50, 1, 32),
]  # fmt: skip
BOUNDARIES = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513]
DTYPES = [torch.float32, torch.bfloat16]
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]

pytestmark = pytest.mark.usefixtures("poisoned")


def bfloat16_tolerance(case: Case, exact: Tensor) -> Tensor:
    """How far the result for bfloat16 queries may be from ``exact``, element by element.

    The result is rounded to half a unit in its last place, which is at most 2^-8 of it. Weights are rounded as much,
    or, beside int8 cells, to 16 bits, as are the queries. The errors of weights are independent of each other, and of
    values that are random around zero, as those of a :class:`Case` are: in a sum over keys they cancel out as much as
    the values themselves do, so they are relative to the root mean square of a head's result. The largest found is 1.8
    of 2^-8 of it, and 1/25 beside int8 cells: 3 and 1/12 are allowed.
    """
    size = exact.pow(2).mean(-1, keepdim=True).sqrt()
    return 2**-8 * (exact.abs() + (1 / 12 if case.k.dtype == torch.int8 else 3) * size) + 1e-5


def check(ops: Ops, case: Case, bound: Tensor | None = None) -> Tensor:
    """The result, which is no further from the exact one than the bound, or the tolerance for its dtype."""
    out, exact = ops.paged_attention(*case.args), exact_attention(case)
    assert out.dtype == case.q.dtype
    assert out.isfinite().all()
    if bound is None:
        bound = tolerance(case) if out.dtype == torch.float32 else bfloat16_tolerance(case, exact)
    error = (out.double() - exact).abs()
    assert (error <= bound).all(), (error / bound).max()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_equals_float64(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(ops, make_case(BOUNDARIES, [1] * len(BOUNDARIES), heads, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_mixed_batches_equal_float64(ops: Ops, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths, new = [65, 1, 300, 64, 513, 200, 40], [65, 1, 1, 7, 130, 2, 33]
    check(ops, make_case(lengths, new, heads, dtype, shared=36))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cells_of_every_dtype_equal_float64(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(ops, make_case([1, 130, 300, 80], [1, 1, 40, 6], (6, 2, 80), dtype, kv_dtype=kv_dtype, page_size=4))


@pytest.mark.parametrize("new", [1, 300])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_row_equals_float64(ops: Ops, dtype: torch.dtype, new: int) -> None:
    check(ops, make_case([2000], [new], (9, 3, 64), dtype))


@pytest.mark.slow
def test_a_very_long_row_equals_float64(ops: Ops) -> None:
    check(ops, make_case([33000], [1], (32, 8, 128), torch.bfloat16))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("position", [0, 1, 127, 128, 1000, 1998, 1999])
def test_one_missing_key_of_a_long_row_exceeds_the_tolerance(ops: Ops, position: int, kv_dtype: torch.dtype) -> None:
    case = make_case([2000], [1], (9, 3, 64), torch.bfloat16, kv_dtype=kv_dtype)
    others = torch.arange(case.page_table.shape[1]) != position
    fewer = replace(case, page_table=case.page_table[:, others].contiguous(), seq_len=case.seq_len - 1)
    out, exact = ops.paged_attention(*fewer.args), exact_attention(case)
    assert ((out.double() - exact).abs() > bfloat16_tolerance(case, exact)).any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "window", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 100, 300, 1000)), 128, 129]
)
@pytest.mark.parametrize("chunked", [False, True])
def test_windows_equal_float64(
    ops: Ops, chunked: bool, window: int, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    lengths, new = [1, 130, 700, 300, 257], [1, 1, 200, 6, 257]
    options = {"kv_dtype": kv_dtype, "page_size": 4, "chunked": chunked}
    check(ops, make_case(lengths, new, (6, 2, 64), dtype, window=window, **options))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 1.0, "sinks": True, "window": 20}])
def test_soft_caps_and_sinks_equal_float64(
    ops: Ops, how: dict[str, Any], dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    check(ops, make_case([1, 130, 700, 300], [1, 1, 200, 6], (6, 2, 48), dtype, kv_dtype=kv_dtype, **how))


@pytest.mark.parametrize("sink", [-80.0, 0.0, 80.0])
def test_extreme_sinks(ops: Ops, sink: float) -> None:
    case = make_case([300, 40], [1, 40], (4, 2, 32), torch.float32, sinks=True)
    check(ops, replace(case, scoring=replace(case.scoring, sinks=torch.full((4,), sink))))


@pytest.mark.parametrize("new", [1, 6, 120])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_weight_is_left_of_a_far_lower_score(ops: Ops, new: int, dtype: torch.dtype) -> None:
    """2^-126 of the largest values would be some units."""
    case = make_case([130], [new], (6, 2, 32), dtype)
    case.q.abs_()
    loc = case.page_table[case.rows[0], 3]
    for cells, value in ((case.k, -50.0), (case.v, 3e38)):
        assert isinstance(cells, torch.Tensor)
        cells[loc] = value
    check(ops, case)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Case, list[tuple[list[int], int]]]:
    """A batch whose rows share a prefix, and groups of rows that are told to share some of it."""
    group, n_kv_heads = draw(st.sampled_from([(1, 3), (3, 1), (3, 2), (4, 2), (5, 1), (8, 1), (12, 1), (13, 1)]))
    dim = draw(st.sampled_from([32, 48, 64]))
    shared = draw(st.sampled_from([0, 127, 128, 130, 260, 384]))
    n_rows = draw(st.integers(1, 6))
    new = [draw(st.sampled_from([1, 1, 1, 2, 4, 5, 17, 40])) for _ in range(n_rows)]
    lengths = [shared + n + draw(st.sampled_from([0, 1, 14, 127, 128, 140])) for n in new]
    case = make_case(
        lengths, new, (group * n_kv_heads, n_kv_heads, dim), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)),
        shared, draw(st.sampled_from([None, *KV_DTYPES])), draw(st.sampled_from([1, 4, 16])),
        draw(st.sampled_from([0.0, 0.0, 1.5])), draw(st.sampled_from([0, 0, 3, 127, 200])), draw(st.booleans()),
    )  # fmt: skip
    names = [draw(st.integers(0, 2)) for _ in range(n_rows)]
    groups = []
    for name in range(2):
        rows = [i for i in range(n_rows) if names[i] == name]
        if rows and shared:
            groups.append((rows, draw(st.integers(1, shared))))
    return case, groups


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), threads=st.sampled_from([1, 2, 3]))
def test_groups_change_no_bit(ops: Ops, problem: tuple[Case, list[tuple[list[int], int]]], threads: int) -> None:
    case, groups = problem
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = check(ops, case)
        if groups:
            assert torch.equal(ops.paged_attention(*case.args, make_groups(*groups)), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("two_threads")
def test_many_rows_of_one_prefix(ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    if ops.name == "reference":
        pytest.skip("the reference never shares")
    n = 40
    lengths, new = [400 + 3 * i for i in range(n)], [1 if i % 7 else 5 for i in range(n)]
    case = make_case(lengths, new, (9, 3, 64), dtype, shared=390, kv_dtype=kv_dtype)
    alone = check(ops, case)
    for groups in (
        [(list(range(n)), 390)],
        [(list(range(0, n, 2)), 390), (list(range(1, n, 2)), 200)],
        [([3, 1, 2], 384), ([0], 390), ([30, 20], 129)],
    ):
        assert torch.equal(ops.paged_attention(*case.args, make_groups(*groups)), alone)


def test_a_group_reads_the_prefix_once(ops: Ops) -> None:
    """A row that is told to share reads the first member's cells: what stands in its own is not looked at."""
    if ops.name == "reference":
        pytest.skip("the reference never shares")
    case = make_case([300, 300], [1, 1], (3, 1, 64), torch.float32, shared=256)
    expected = ops.paged_attention(*case.args)
    for row in case.rows.tolist():
        broken = replace(case, page_table=case.page_table.clone())
        broken.page_table[row, :256] = 2**30
        readers = [i for i, r in enumerate(case.rows.tolist()) if r == row]
        groups = make_groups(([*readers, *(i for i in (0, 1) if i not in readers)], 256))
        assert torch.equal(ops.paged_attention(*broken.args, groups), expected)


def test_large_scores_do_not_overflow(ops: Ops) -> None:
    case = make_case([300], [20], (4, 2, 64), torch.float32)
    case.q *= 1000
    out = ops.paged_attention(*case.args)
    assert torch.allclose(out.double(), exact_attention(case), atol=5e-3)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[:-1], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("new", [3, 40])
def test_a_nan_stays_in_its_row(ops: Ops, new: int, dtype: torch.dtype, kv_dtype: torch.dtype, where: str) -> None:
    case = make_case([70, 90], [new, new], (4, 2, 32), dtype, kv_dtype=kv_dtype)
    clean = ops.paged_attention(*case.args)
    cells = case.k if where == "k" else case.v
    assert isinstance(cells, Tensor)
    cells[case.page_table[case.rows[0], 5].long()] = torch.nan
    out = ops.paged_attention(*case.args)
    assert out[:new].isnan().all(), "a broken row has to show"
    assert torch.equal(out[new:], clean[new:])


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("new", [1, 40])
def test_a_nan_beside_int8_cells_stays_in_its_row(ops: Ops, new: int, where: str) -> None:
    case = make_case([70, 90], [new, new], (4, 2, 32), torch.bfloat16, kv_dtype=torch.int8)
    clean, cell = ops.paged_attention(*case.args), case.page_table[case.rows[0], 5].long()
    if where == "q":
        case.q[:new] = torch.nan
    else:
        cells = case.k if where == "k" else case.v
        assert isinstance(cells, QuantizedCells)
        cells.scale[cell] = torch.nan
    out = ops.paged_attention(*case.args)
    assert out[:new].isnan().all(), "a broken row has to show"
    assert torch.equal(out[new:], clean[new:])


@pytest.mark.parametrize("new", [1, 40])
@pytest.mark.parametrize(
    "q_size,v_size", [(0.0, 1.0), (1e-38, 1.0), (30.0, 1.0), (1.0, 0.0), (1.0, 1e-38), (1.0, 1e30)]
)
def test_extremes_beside_int8_cells(ops: Ops, new: int, q_size: float, v_size: float) -> None:
    case = make_case([70, 200], [new, new], (4, 2, 32), torch.bfloat16, kv_dtype=torch.int8)
    case.q.mul_(q_size)
    assert isinstance(case.k, QuantizedCells) and isinstance(case.v, QuantizedCells)
    case.v.scale.mul_(v_size)
    # A query has 16 bits of its largest value. What that may do to a score, it does to a weight in proportion.
    pages = [case.page_table[row, :n].long() for row, n in zip(case.rows.tolist(), case.seq_len.tolist())]
    most = max(float(read_cells(case.k, locs).abs().sum(2).max()) for locs in pages)
    score = float(case.q.abs().max()) / (2 * 127 * 256) * most * case.scoring.scale
    check(ops, case, (1 + 2**8 * 2 * score) * tolerance(case))


# The compiled kernels promise it for bfloat16, too; so does the reference, which computes in float32.
@pytest.mark.parametrize("how", [{}, {"window": 140, "sinks": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype,kv_dtype", [*((d, d) for d in DTYPES), (torch.bfloat16, torch.int8)], ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_depend_on_the_row_alone(
    ops: Ops, dtype: torch.dtype, kv_dtype: torch.dtype, threads: int, how: dict[str, Any]
) -> None:
    if ops.name == "reference" and threads > 1:
        pytest.skip("the reference leaves threads to torch")
    lengths, new = [700, 90, 300, 1, 600], [130, 90, 1, 1, 40]
    case = make_case(lengths, new, (9, 3, 64), dtype, kv_dtype=kv_dtype, **how)
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


# Tiles know no denormals; nor may what computes in vectors beside them.
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 80), (6, 1, 32)], ids=str)
def test_bits_of_the_smallest_values_depend_on_the_row_alone(ops: Ops, heads: tuple[int, int, int]) -> None:
    case = make_case([300, 200], [130, 40], heads, torch.bfloat16)
    assert isinstance(case.v, Tensor)
    case.v.mul_(1e-36)
    whole = ops.paged_attention(*case.args)
    assert whole.isfinite().all() and whole.count_nonzero() > 0
    for begin, end in [(0, 1), (1, 3), (60, 61), (129, 130)]:
        part = ops.paged_attention(*sub_batch(case, [(0, begin, end)]).args)
        assert torch.equal(part, whole[begin:end])


def test_odd_head_dimensions_work(ops: Ops) -> None:
    check(ops, make_case([70, 5], [1, 5], (4, 2, 24), torch.float32))
    check(ops, make_case([70, 5], [1, 5], (4, 2, 24), torch.bfloat16, kv_dtype=torch.int8))


def test_heads_without_a_kernel_are_warned_of_once(ops: Ops, caplog: pytest.LogCaptureFixture) -> None:
    _warn_of_heads.cache_clear()
    for dim in (24, 32, 24):
        ops.paged_attention(*make_case([70, 5], [1, 5], (4, 2, dim), torch.float32).args)
    told = [record.message for record in caplog.records if "dimensions" in record.message]
    assert len(told) == (ops.name == "cpu") and all("24" in message for message in told)


def test_the_backend_passes_its_plan_on(ops: Ops) -> None:
    case = make_case([70, 5], [1, 5], (4, 2, 32), torch.float32)
    positions = torch.tensor([69, 0, 1, 2, 3, 4], dtype=torch.int32)
    owner = case.rows.repeat_interleave(torch.tensor([1, 5])).long()
    out_loc = case.page_table[owner, positions.long()]
    backend = PagedAttention(ops)
    with pytest.raises(RuntimeError, match="plan"):
        backend.forward(case.q, case.k, case.v, case.scoring)
    backend.plan(AttentionBatch(case.page_table, case.rows, case.q_start, case.seq_len, positions, out_loc))
    qkv, table = torch.randn(6, 8 * 32), torch.randn(80, 32)
    q = backend.write(qkv, table, case.k, case.v, Heads(4, 2, 32))
    assert isinstance(case.v, Tensor)
    assert torch.equal(case.v[out_loc.long()], qkv[:, -64:].view(6, 2, 32))
    expected = exact_attention(replace(case, q=q))
    assert torch.allclose(backend.forward(q, case.k, case.v, case.scoring).double(), expected, atol=2e-6)


def test_shapes_that_do_not_fit_are_refused(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("torch itself refuses them")
    case = make_case([70, 5], [1, 5], (4, 2, 32), torch.float32)
    with pytest.raises(ValueError, match="int32"):
        ops.paged_attention(*case.args[:4], case.rows.long(), *case.args[5:])
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.paged_attention(case.q.half(), *case.args[1:])
    with pytest.raises(ValueError, match="dtype"):
        ops.paged_attention(case.q, make_case([75], [1], (4, 2, 32), torch.bfloat16).k, *case.args[2:])
    with pytest.raises(ValueError, match="contiguous"):
        ops.paged_attention(case.q.transpose(0, 1).contiguous().transpose(0, 1), *case.args[1:])
    with pytest.raises(ValueError, match="paged_attention"):
        ops.paged_attention(*case.args[:5], case.q_start[:-1], *case.args[6:])
    with pytest.raises(ValueError, match="paged_attention"):
        ops.paged_attention(case.q[:-1], *case.args[1:])
    with pytest.raises(ValueError, match="paged_attention"):
        ops.paged_attention(*case.args[:6], case.seq_len - 1, *case.args[7:])
    with pytest.raises(ValueError, match="paged_attention"):
        ops.paged_attention(*case.args[:6], case.seq_len + case.page_table.shape[1], *case.args[7:])
