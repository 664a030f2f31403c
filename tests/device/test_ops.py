"""Norms, activation, rotary embedding, argmax and linear layers against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.ops.cells import Cells, QuantizedCells, read_cells, write_cells
from bough.device.ops.heads import HeadNorm, Heads
from bough.device.ops.packed import pack_bf16
from bough.device.ops.registry import Ops
from bough.device.quant.dense import DenseLinear

from .cases import empty_cells
from .exact import close, exact_norm, randn

Tensor = torch.Tensor

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 576), (3, 64), (5, 7), (40, 1000)]

relaxed = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
rows, seeds, dtypes = st.integers(0, 40), st.integers(0, 999), st.sampled_from(DTYPES)
# The large ones, with many rows, are divided among threads.
dims = st.integers(1, 200) | st.sampled_from([577, 1001])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype, seed=1)
    residual = randn(*shape, dtype=dtype, seed=2)
    close(ops.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5), 2)
    added = x + residual
    out = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, added), "the residual stream is changed in place"
    close(out, exact_norm(added, weight, 1e-6), 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_silu_mul(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, dim = shape
    x = randn(n, 2 * dim, dtype=dtype) * 20
    gate, up = x.double().chunk(2, -1)
    close(ops.silu_mul(x), torch.nn.functional.silu(gate) * up, 2)
    extreme = torch.tensor([[-3e4, -200.0, 200.0, 3e4, 1, 1, 1, 1]], dtype=dtype)
    assert torch.allclose(ops.silu_mul(extreme).float(), torch.tensor([[0.0, 0.0, 200.0, 3e4]]), rtol=5e-3)


@pytest.mark.parametrize("gate", [129.0, 167.0, 255.0])
def test_products_are_rounded_to_the_nearest_even(ops: Ops, gate: float) -> None:
    up = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    up = up[up.isfinite() & (up.abs() > 2.0**-120)]
    product = ops.silu_mul(torch.cat((torch.full_like(up, gate), up))[None])
    assert torch.equal(product[0], (up.float() * gate).bfloat16())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_with_float32_weights(ops: Ops, shape: tuple[int, int]) -> None:
    x, residual = randn(*shape, dtype=torch.bfloat16), randn(*shape, dtype=torch.bfloat16, seed=1)
    weight = 1 + randn(shape[1], seed=2) / 8

    def exact(wide: Tensor) -> Tensor:
        wide = wide.double()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()

    close(ops.rms_norm(x, weight, 1e-5), exact(x))
    total = residual + x
    close(ops.add_rms_norm(x, residual, weight, 1e-5), exact(total))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_mul(ops: Ops, shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, dim = shape
    x = randn(n, 2 * dim, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    exact = torch.nn.functional.gelu(gate, approximate="tanh") * up
    # Far below 0 gelu is a small difference of large numbers in torch's own.
    bound = (2e-6 if dtype == torch.float32 else 0.01) * exact.abs() + 2e-6 * (1 + up.abs())
    assert ((ops.gelu_mul(x).double() - exact).abs() <= bound).all()
    extreme = torch.tensor([[-3e4, -200.0, 200.0, 3e4, 1, 1, 1, 1]], dtype=dtype)
    assert torch.allclose(ops.gelu_mul(extreme).float(), torch.tensor([[0.0, 0.0, 200.0, 3e4]]), rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 0), (64, 32), (24, 10)])
def test_heads_are_normed_and_rotated_in_neighbouring_pairs(
    ops: Ops, dim: int, rotary: int, wide: bool, dtype: torch.dtype
) -> None:
    n, heads, kv_heads = 5, 6, 2
    qkv = randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = randn(50, rotary // 2, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions, out_loc = torch.randperm(50)[:n].int(), torch.arange(n).int()
    k, v = (torch.full((n, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    weights = [(1 + randn(dim, seed=seed) / 8).to(torch.float32 if wide else dtype) for seed in (2, 3)]
    norm = HeadNorm(weights[0], weights[1], 1e-5)
    q = ops.rope_kv_write(qkv, table, positions, out_loc, k, v, Heads(heads, kv_heads, dim, True, norm))
    given = qkv.view(n, heads + 2 * kv_heads, dim).double()
    normed = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + 1e-5)
    if not wide:
        normed = normed.to(dtype).double()
    c, s = (t[positions.long()].double()[:, None] for t in table.chunk(2, -1))
    for found, weight, part in ((q, weights[0], normed[:, :heads]), (k, weights[1], normed[:, heads:-kv_heads])):
        x = part * weight.double()
        a, b = x[..., :rotary:2], x[..., 1:rotary:2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        exact = torch.cat((turned, x[..., rotary:]), -1)
        bound = 1e-5 if dtype == torch.float32 else 0.03
        assert (found.double() - exact).abs().max() <= bound
    assert torch.equal(v, given[:, -kv_heads:].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (64, 32), (24, 10)])
def test_rope_kv_write(ops: Ops, dim: int, rotary: int, dtype: torch.dtype) -> None:
    n, heads, kv_heads, half = 9, 6, 2, rotary // 2
    qkv = randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = randn(50, half, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randperm(50)[:n].int()
    out_loc = torch.randperm(30)[:n].int()
    k, v = (torch.full((30, kv_heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    q = ops.rope_kv_write(qkv, table, positions, out_loc, k, v, Heads(heads, kv_heads, dim))
    given = qkv.view(n, heads + 2 * kv_heads, dim)
    wide = given.double()
    c, s = (t[positions.long()].double()[:, None] for t in table.chunk(2, -1))
    a, b = wide[..., :half], wide[..., half:rotary]
    turned = torch.cat((a * c - b * s, b * c + a * s, wide[..., rotary:]), -1)
    where = out_loc.long()
    close(q, turned[:, :heads])
    close(k[where], turned[:, heads : heads + kv_heads])
    assert torch.equal(v[where], given[:, heads + kv_heads :])
    others = torch.ones(30, dtype=torch.bool)
    others[where] = False
    assert k[others].isnan().all() and v[others].isnan().all(), "no other cell is touched"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 24])
def test_rope_kv_write_rounds_to_the_cells(ops: Ops, dim: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    n, heads, kv_heads = 7, 4, 2
    qkv = randn(n, (heads + 2 * kv_heads) * dim, dtype=dtype) * 10 ** torch.arange(-4, 3)[:, None].to(dtype)
    values = qkv.view(n, heads + 2 * kv_heads, dim)[:, heads + kv_heads :]
    values[1] = 0.0
    values[2, 1, 3] = torch.nan
    values[3, 0, 0] = torch.inf
    values[4, 1] = 1e-44  # of which a 127th is 0
    angles = randn(50, dim // 2, seed=1)
    table = torch.cat((angles.cos(), angles.sin()), -1)
    positions, out_loc = torch.arange(n).int(), torch.randperm(30)[:n].int()
    mine, wide = ([empty_cells(30, kv_heads, dim, t) for _ in "kv"] for t in (kv_dtype, dtype))
    ops.rope_kv_write(qkv, table, positions, out_loc, mine[0], mine[1], Heads(heads, kv_heads, dim))
    ops.rope_kv_write(qkv, table, positions, out_loc, wide[0], wide[1], Heads(heads, kv_heads, dim))
    for cells, unrounded in zip(mine, wide):
        expected = empty_cells(30, kv_heads, dim, kv_dtype)
        write_cells(expected, out_loc, read_cells(unrounded, out_loc).to(dtype))
        for found, other in zip(tensors_of(cells), tensors_of(expected)):
            assert torch.equal(found[out_loc].nan_to_num(7.0), other[out_loc].nan_to_num(7.0))
        if kv_dtype == torch.int8:
            exact = read_cells(unrounded, out_loc).double()
            step = exact.abs().amax(-1, keepdim=True) / 127
            error = (read_cells(cells, out_loc).double() - exact).abs()
            tiny = torch.finfo(torch.float32).tiny  # below it a scale has fewer bits
            assert (error <= 0.5001 * step + tiny).logical_or(~exact.isfinite().all(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [3, 16, 1000, 49152])
def test_argmax(ops: Ops, vocab: int, dtype: torch.dtype) -> None:
    logits = randn(8, vocab, dtype=dtype)
    logits[1, -1] = logits[1, 1] = 100.0
    logits[2, 0] = torch.nan
    logits[3, vocab - 1] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1:] = -torch.inf
    out = ops.argmax(logits)
    assert out.dtype == torch.int64
    assert out[1:6].tolist() == [1, -1, -1, -1, 0]
    for row in (0, 6, 7):
        assert out[row] == (logits[row] == logits[row].max()).nonzero()[0, 0]


def linear(weight: Tensor, bias: Tensor | None, ops: Ops) -> Callable[[Tensor], Tensor]:
    """As the ops multiply: compiled kernels have packed weights of bfloat16."""
    if ops.name == "cpu" and weight.dtype == torch.bfloat16:
        return ops.packed_linear(pack_bf16(weight), None if bias is None else bias.float())
    return DenseLinear(weight.clone(), bias, ops).apply


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 64), (37, 70), (576, 1000)])
def test_linear(ops: Ops, n_in: int, n_out: int, dtype: torch.dtype, bias: bool) -> None:
    weight, b = randn(n_out, n_in, dtype=dtype), randn(n_out, dtype=dtype, seed=1) if bias else None
    multiply = linear(weight, b, ops)
    for n in (0, 1, 3, 16, 100):
        x = randn(n, n_in, dtype=dtype, seed=2)
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        out = multiply(x)
        assert out.dtype == dtype and out.shape == (n, n_out)
        bound = 1e-6 * n_in if dtype == torch.float32 else 2**-8 * exact.abs() + 2e-2
        assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("n_in", "n_out"), [(64, 192), (576, 960), (100, 33), (1536, 576), (576, 5000)])
def test_float32_linear_bits_depend_on_the_row_alone(ops: Ops, n_in: int, n_out: int) -> None:
    method = DenseLinear(randn(n_out, n_in), randn(n_out, seed=1), ops)
    x = randn(150, n_in, seed=2)
    whole = method.apply(x)
    before = torch.get_num_threads()
    try:
        # How many threads compute the reference is torch's affair, and may change its last bit.
        for threads in (before,) if ops.name == "reference" else (1, 2, 3):
            torch.set_num_threads(threads)
            for begin, end in [(0, 1), (5, 6), (15, 17), (3, 40), (20, 150), (149, 150), (64, 128)]:
                assert torch.equal(method.apply(x[begin:end]), whole[begin:end])
            assert torch.equal(method.apply(x.flip(0)).flip(0), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_ops_bits_depend_on_the_row_alone(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = randn(90, 576, dtype=dtype) * 3, randn(576, dtype=dtype, seed=1)
    for op in (lambda t: ops.rms_norm(t, weight, 1e-5), lambda t: ops.silu_mul(t)):
        whole = op(x)
        for begin, end in [(0, 1), (7, 8), (30, 61), (89, 90)]:
            assert torch.equal(op(x[begin:end]), whole[begin:end])


def test_wrong_arguments_are_refused(ops: Ops) -> None:
    if ops.name == "reference":
        pytest.skip("torch itself refuses them")
    x, weight = randn(3, 64), randn(64)
    with pytest.raises(ValueError, match="dtype"):
        ops.rms_norm(x, weight.bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="rms_norm"):
        ops.rms_norm(x, weight[:32], 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        ops.silu_mul(x.T)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        ops.argmax(x.double())
    with pytest.raises(ValueError, match="linear"):
        ops.linear(randn(8, 64), None)(randn(3, 32))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_apply_bitmask(ops: Ops, vocab: int) -> None:
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.3
    words = torch.zeros(3, -(-vocab // 32), dtype=torch.int64)
    for row, column in allowed.nonzero().tolist():
        words[row, column // 32] |= 1 << column % 32
    masks = words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)
    logits = randn(5, vocab)
    expected = logits.clone()
    rows = torch.tensor([4, 0, 2])
    expected[rows] = expected[rows].masked_fill(~allowed, -torch.inf)
    ops.apply_bitmask(logits, masks, rows)
    assert torch.equal(logits, expected)


@pytest.mark.usefixtures("poisoned", "two_threads")
@relaxed
@given(
    n=rows, dim=dims, dtype=dtypes, wide=st.booleans(), eps=st.sampled_from([1e-6, 1e-5, 0.1]),
    size=st.sampled_from([0.001, 1.0, 1000.0]), seed=seeds,
)  # fmt: skip
def test_norms_of_any_shape(
    ops: Ops, n: int, dim: int, dtype: torch.dtype, wide: bool, eps: float, size: float, seed: int
) -> None:
    x, residual = (randn(n, dim, seed=seed + i).mul(size).to(dtype) for i in range(2))
    weight = randn(dim, dtype=torch.float32 if wide else dtype, seed=seed + 2)
    found, added = ops.rms_norm(x, weight, eps), x + residual
    assert found.dtype == dtype
    close(found, exact_norm(x, weight, eps), 2)
    found = ops.add_rms_norm(x, residual, weight, eps)
    assert found.dtype == dtype and torch.equal(residual, added)
    close(found, exact_norm(added, weight, eps), 2)


@pytest.mark.usefixtures("poisoned", "two_threads")
@relaxed
@given(n=rows, dim=dims, dtype=dtypes, size=st.sampled_from([0.01, 1.0, 20.0]), seed=seeds)
def test_gates_of_any_shape(ops: Ops, n: int, dim: int, dtype: torch.dtype, size: float, seed: int) -> None:
    x = randn(n, 2 * dim, seed=seed).mul(size).to(dtype)
    gate, up = x.double().chunk(2, -1)
    found = ops.silu_mul(x)
    assert found.dtype == dtype
    close(found, torch.nn.functional.silu(gate) * up, 2)
    found, exact = ops.gelu_mul(x), torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert found.dtype == dtype
    bound = (2e-6 if dtype == torch.float32 else 0.01) * exact.abs() + 2e-6 * (1 + up.abs())
    assert ((found.double() - exact).abs() <= bound).all()


@dataclass
class Turning:
    """Arguments of one call of rope_kv_write, but for the cells."""

    qkv: Tensor
    table: Tensor
    positions: Tensor
    out_loc: Tensor
    heads: Heads
    kv_dtype: torch.dtype

    def run(self, ops: Ops, kv_dtype: torch.dtype) -> tuple[Tensor, Cells, Cells]:
        """Queries, and cells of which none was written before."""
        n_cells = len(self.positions) + 3
        k, v = (empty_cells(n_cells, self.heads.n_kv_heads, self.heads.dim, kv_dtype) for _ in "kv")
        return ops.rope_kv_write(self.qkv, self.table, self.positions, self.out_loc, k, v, self.heads), k, v


@st.composite
def turnings(draw: st.DrawFn) -> Turning:
    """Any heads that the kernels take: those beyond 512 have no norm, and cells of their own dtype."""
    n, dtype, seed = draw(rows), draw(dtypes), draw(seeds)
    dim = draw(st.integers(1, 100) | st.sampled_from([128, 256, 512, 515]))
    rotary = 2 * draw(st.integers(0, dim // 2) | st.just(dim // 2))
    n_kv_heads = draw(st.integers(1, 3))
    n_heads = n_kv_heads * draw(st.integers(1, 4))
    norm, kv_dtype = None, dtype
    if dim <= 512:
        kv_dtype = draw(st.sampled_from([dtype, torch.float32, torch.bfloat16, torch.float16, torch.int8]))
        weight_dtype = draw(st.sampled_from([None, dtype, torch.float32]))
        if weight_dtype is not None:
            q, k = ((1 + randn(dim, seed=seed + i) / 8).to(weight_dtype) for i in range(2))
            norm = HeadNorm(q, k, draw(st.sampled_from([1e-6, 1e-5])))
    angles, g = randn(50, rotary // 2, seed=seed + 2), torch.Generator().manual_seed(seed)
    return Turning(
        randn(n, (n_heads + 2 * n_kv_heads) * dim, dtype=dtype, seed=seed + 3),
        torch.cat((angles.cos(), angles.sin()), -1),
        torch.randint(0, 50, (n,), generator=g).int(),
        torch.randperm(n + 3, generator=g)[:n].int(),
        Heads(n_heads, n_kv_heads, dim, draw(st.booleans()), norm),
        kv_dtype,
    )


def check_turned(found: Tensor, x: Tensor, weight: Tensor | None, turning: Turning) -> None:
    """found [T, heads, D] is x, normed with the weight if there is one, and rotated."""
    wide, rotary = x.double(), turning.table.shape[1]
    if weight is not None and turning.heads.norm is not None:
        wide = exact_norm(wide, weight, turning.heads.norm.eps)
    c, s = (t[turning.positions.long()].double()[:, None] for t in turning.table.chunk(2, -1))
    first = slice(0, rotary, 2) if turning.heads.interleaved else slice(0, rotary // 2)
    second = slice(1, rotary, 2) if turning.heads.interleaved else slice(rotary // 2, rotary)
    a, b, exact, size = wide[..., first], wide[..., second], wide.clone(), wide.abs()
    exact[..., first], exact[..., second] = a * c - b * s, b * c + a * s
    size[..., first], size[..., second] = (a * c).abs() + (b * s).abs(), (b * c).abs() + (a * s).abs()
    # A norm in bfloat16 is rounded before its weight multiplies it and again before it is rotated.
    within = 1.1 * 2**-7 if weight is not None and x.dtype == torch.bfloat16 else 2e-6
    unit = 2**-8 if x.dtype == torch.bfloat16 else 4e-7
    assert ((found.double() - exact).abs() <= unit * exact.abs() + within * size + 1e-6).all()


@pytest.mark.usefixtures("poisoned", "two_threads")
@relaxed
@given(turning=turnings())
def test_any_heads_are_turned_and_written(ops: Ops, turning: Turning) -> None:
    heads, where, dtype = turning.heads, turning.out_loc, turning.qkv.dtype
    q_norm, k_norm = (None, None) if heads.norm is None else (heads.norm.q, heads.norm.k)
    split = heads.n_heads, heads.n_kv_heads, heads.n_kv_heads
    asked, keys, values = turning.qkv.view(len(where), sum(split), heads.dim).split(split, dim=1)
    q, *unrounded = turning.run(ops, dtype)
    assert q.dtype == dtype
    check_turned(q, asked, q_norm, turning)
    check_turned(read_cells(unrounded[0], where), keys, k_norm, turning)
    assert torch.equal(read_cells(unrounded[1], where), values.float())
    again, *cells = turning.run(ops, turning.kv_dtype)
    assert torch.equal(again, q), "what cells hold changes no query"
    for mine, wide in zip(cells, unrounded):
        expected = empty_cells(len(where) + 3, heads.n_kv_heads, heads.dim, turning.kv_dtype)
        write_cells(expected, where, read_cells(wide, where).to(dtype))
        for found, other in zip(tensors_of(mine), tensors_of(expected)):
            assert torch.equal(found.nan_to_num(7.0), other.nan_to_num(7.0)), "nor is any other cell touched"
            assert torch.equal(found.isnan(), other.isnan())


def tensors_of(cells: Cells) -> list[Tensor]:
    return [cells.data, cells.scale] if isinstance(cells, QuantizedCells) else [cells]


@pytest.mark.usefixtures("poisoned", "two_threads")
@relaxed
@given(n=rows, vocab=dims, dtype=dtypes, digits=st.integers(0, 3), holes=st.sampled_from([0.0, 0.01, 0.5]), seed=seeds)
def test_argmax_of_any_shape(
    ops: Ops, n: int, vocab: int, dtype: torch.dtype, digits: int, holes: float, seed: int
) -> None:
    """The first of equals, and no token of a row that holds NaN or infinity or nothing but minus infinity."""
    logits, g = randn(n, vocab, seed=seed).round(decimals=digits).to(dtype), torch.Generator().manual_seed(seed)
    logits[torch.rand(n, vocab, generator=g) < holes] = -torch.inf
    for value in (torch.nan, torch.inf):
        logits[torch.rand(n, vocab, generator=g) < 0.2 / vocab] = value
    expected = []
    for row in logits.tolist():
        best = max(row) if all(value < torch.inf for value in row) else -torch.inf
        expected.append(-1 if best == -torch.inf else row.index(best))
    assert ops.argmax(logits).tolist() == expected


@pytest.mark.usefixtures("poisoned", "two_threads")
@relaxed
@given(n=rows, n_in=dims, n_out=st.integers(1, 200), dtype=dtypes, bias=st.booleans(), seed=seeds)
def test_linear_layers_of_any_shape(
    ops: Ops, n: int, n_in: int, n_out: int, dtype: torch.dtype, bias: bool, seed: int
) -> None:
    weight, x = randn(n_out, n_in, dtype=dtype, seed=seed), randn(n, n_in, dtype=dtype, seed=seed + 1)
    b = randn(n_out, dtype=dtype, seed=seed + 2) if bias else None
    out = linear(weight, b, ops)(x)
    assert out.dtype == dtype and out.shape == (n, n_out)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    size = x.double().abs() @ weight.double().abs().T
    bound = 1e-6 * (1 + exact.abs() + size) if dtype == torch.float32 else 2**-8 * exact.abs() + 2e-2
    assert ((out.double() - exact).abs() <= bound).all()
