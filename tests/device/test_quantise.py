"""Rounding of weights while a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.ops.cpu import CpuOps
from bough.device.ops.packed import Kind, unpack
from bough.device.ops.quantise import quantise
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from bough.device.quant.base import Blocks
from bough.device.quant.dense import DenseLinear, DenseScheme, DenseTable
from bough.device.quant.packed import PackedTable
from bough.device.quant.scheme import Quantize, resolve_scheme

Tensor = torch.Tensor


@dataclass
class Given:
    """A parameter that is in memory already."""

    weight: Tensor
    stored: Blocks | None = None

    def dense(self) -> Tensor:
        return self.weight

    def blocks(self) -> Blocks | None:
        return self.stored


def weight(n_out: int, n_in: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(n_in)).to(dtype)


KINDS = [Kind.INT8, Kind.ROTATED, Kind.Q8, Kind.Q4_K]


@pytest.mark.parametrize("shape", [(40, 64), (5000, 32), (3, 70), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_the_nearest_of_their_grid(shape: tuple[int, int], dtype: torch.dtype) -> None:
    given = weight(*shape, dtype)
    wide = given.float()
    whole = unpack(quantise(Kind.INT8, given))
    assert ((whole - wide).abs() <= wide.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    grouped = unpack(quantise(Kind.Q8, given))
    assert ((grouped - wide).abs() <= wide.abs().amax(1, keepdim=True) / 127 * 0.51).all()
    four = unpack(quantise(Kind.Q4_K, given))
    spread = wide.amax(1, keepdim=True).clamp(min=0) - wide.amin(1, keepdim=True).clamp(max=0)
    assert ((four - wide).abs() <= spread / 15 * 2.6).all(), "what is cut off at most a quarter of the range"


def test_four_bits_keep_what_had_four_bits() -> None:
    """Groups that lie on grids of 16 values keep their places there; steps are rounded, and fitted to the minima."""
    g = torch.Generator().manual_seed(0)
    grid, step = torch.randint(0, 16, (80, 11, 32), generator=g), torch.rand(80, 11, 1, generator=g) * 0.9 + 0.1
    grid[:, :, 0], grid[:, :, 1] = 0, 15
    given = (grid - torch.randint(4, 12, step.shape, generator=g)) * step
    found = unpack(quantise(Kind.Q4_K, given.flatten(1))).view_as(given)
    assert ((found - given).abs() < 0.25 * step).all()
    assert (found - given).square().mean() < 0.0003 * step.square().mean(), "rounding to 16 values takes 0.083"


@pytest.mark.parametrize("size", [0.001, 0.003, 0.01, 0.1])
def test_small_groups_beside_large_ones_are_no_worse_than_zeros(size: float) -> None:
    given = weight(200, 1024, torch.float32).view(-1, 8, 32)
    given[:, 1:] *= size
    found = unpack(quantise(Kind.Q4_K, given.view(200, -1))).view_as(given)
    assert ((found - given).square().sum(2) <= given.square().sum(2)).all()


def test_values_far_from_zero_have_it_in_their_range() -> None:
    given = weight(20, 512, torch.float32)
    beside = given.view(20, 8, 2, 32)[:, :, 1]  # every second group
    beside.abs_().add_(3)
    found, step = unpack(quantise(Kind.Q4_K, given)).view(20, 8, 2, 32)[:, :, 1], beside.amax(2, keepdim=True) / 15
    assert (found - beside).square().mean() < step.square().mean() / 12


def test_zeros_stay_zeros() -> None:
    for kind in KINDS:
        assert not unpack(quantise(kind, torch.zeros(20, 64))).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (300, 96), (3, 70), (17, 33), (20, 600), (1, 1)])
@pytest.mark.parametrize("size", [0.02, 1.0, 1e-7, 1e-30, 1e5, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_round_as_torch_does(
    ops: Ops, kind: Kind, shape: tuple[int, int], size: float, dtype: torch.dtype
) -> None:
    given = weight(*shape, torch.float32).mul(size).to(dtype)
    given[0, : shape[1] // 2] = 0
    given[-1] = given[-1, 0]
    expected, found = quantise(kind, given), ops.quantise(kind, given)
    assert (found.kind, found.n_out, found.n_in) == (expected.kind, expected.n_out, expected.n_in)
    assert torch.equal(found.weight, expected.weight)
    assert found.scale is not None and expected.scale is not None
    torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    assert (found.sub is None) == (expected.sub is None)
    assert found.sub is None or expected.sub is None or torch.equal(found.sub, expected.sub)


@pytest.mark.usefixtures("poisoned", "two_threads")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kind=st.sampled_from(KINDS), n_out=st.integers(1, 150), n_in=st.integers(1, 600), zeros=st.integers(0, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), size=st.sampled_from([1e-30, 1e-6, 0.02, 1.0, 1e5, 1e30]),
    reach=st.sampled_from([0.0, 1.0, 3.0]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_weight_is_rounded_as_torch_does(
    ops: Ops, kind: Kind, n_out: int, n_in: int, zeros: int, dtype: torch.dtype, size: float, reach: float, seed: int
) -> None:
    """Values that lie ``reach`` of their spread beside zero, after some zeros in the first row."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(n_out, n_in, generator=g) + reach).mul(size).to(dtype)
    values[0, :zeros] = 0
    expected, found = quantise(kind, values), ops.quantise(kind, values)
    assert torch.equal(found.weight, expected.weight)
    assert found.scale is not None and expected.scale is not None
    torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
    assert (found.sub is None) == (expected.sub is None)
    assert found.sub is None or expected.sub is None or torch.equal(found.sub, expected.sub)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(ops: Ops, kind: Kind, bad: float) -> None:
    given = weight(20, 64)
    given[5, 7] = bad
    found = unpack(ops.quantise(kind, given)).isfinite()
    assert not found[5, :32].any() and found[torch.arange(20) != 5].all()


def test_the_cut_range_is_better_than_the_whole() -> None:
    given = weight(200, 512)
    wide = given.float().view(200, -1, 32)
    low, high = wide.amin(2, keepdim=True), wide.amax(2, keepdim=True)
    scale = (high - low) / 15
    plain = ((wide - low) / scale).round() * scale + low
    cut = unpack(quantise(Kind.Q4_K, given)).view_as(wide)
    assert (cut - wide).pow(2).mean() < 0.95 * (plain - wide).pow(2).mean()


def q8_blocks(given: Tensor) -> Blocks:
    scale = (given.float().view(len(given), -1, 32).abs().amax(2) / 127).half()
    q = (given.float().view(len(given), -1, 32) / scale.float()[..., None]).round().to(torch.int8)
    rows = torch.cat((scale[..., None].view(torch.uint8), q.view(torch.uint8)), dim=2).flatten(1)
    return Blocks("Q8_0", rows, given.shape[1])


@pytest.mark.parametrize("quantize", ["auto", "none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_scheme_computes_the_layer(ops: Ops, quantize: Quantize, dtype: torch.dtype) -> None:
    scheme = resolve_scheme(quantize, ops, dtype)
    a, b, bias = weight(48, 64, dtype), weight(20, 64, dtype), torch.randn(68).to(dtype)
    parameters = [Given(a, q8_blocks(a)), Given(b, Blocks("Q5_1", torch.zeros(20, 48, dtype=torch.uint8), 64))]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = torch.nn.functional.linear(x.double(), torch.cat((a, b)).double(), bias.double())
    found = scheme.linear(parameters, bias).apply(x)
    share = {"auto": 0.02, "none": 0.01, "int8": 0.02, "int4": 0.15}[quantize]
    assert found.dtype == dtype and (found.double() - exact).norm() < share * exact.norm()
    table = scheme.table([Given(a, q8_blocks(a))], tied=True)
    tokens = torch.tensor([3, 47, 3], dtype=torch.int32)
    assert torch.allclose(table.lookup(tokens).float(), a[tokens].float(), atol=0.03)
    for head in (table.head(40), scheme.head([Given(a, q8_blocks(a))], 40)):
        out = head.apply(x)
        assert out.shape == (5, 40) and (out.double() - x.double() @ a[:40].double().T).norm() < 0.02 * exact.norm()


def test_which_form_is_chosen() -> None:
    from bough.device.ops.registry import resolve_ops

    ops = resolve_ops("auto")
    if ops.name == "reference":
        pytest.skip("no kernels here")
    a = weight(48, 64)
    stored, plain = [Given(a, q8_blocks(a))], [Given(a)]
    kept = resolve_scheme("auto", ops, torch.bfloat16)
    tiles = isinstance(ops, CpuOps) and ops.library.isa() == "amx"
    assert kept.linear(stored, None).parts[0].kind == (Kind.ROTATED if tiles else Kind.Q8)
    assert kept.linear(plain, None).parts[0].kind == Kind.BF16
    assert isinstance(kept.table([stored[0]], tied=True), PackedTable)
    for quantize, kind in (("int8", Kind.ROTATED), ("int4", Kind.Q4_WHOLE if tiles else Kind.Q4_K)):
        rounded = resolve_scheme(quantize, ops, torch.bfloat16)
        assert rounded.linear(stored, None).parts[0].kind == kind
        assert rounded.head(plain, 48).parts[0].kind == Kind.ROTATED
    assert isinstance(resolve_scheme("auto", ops, torch.float32), DenseScheme), "float32 is exact"
    assert isinstance(resolve_scheme("auto", ReferenceOps("test"), torch.bfloat16), DenseScheme)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("quantize", "kind"), [("int8", Kind.ROTATED), ("int4", Kind.Q4_K)])
def test_without_kernels_weights_are_rounded_once_and_held_dense(
    quantize: Quantize, kind: Kind, dtype: torch.dtype
) -> None:
    ops = ReferenceOps("under test")
    scheme, dense = resolve_scheme(quantize, ops, dtype), DenseScheme(ops)
    a, b, bias = weight(48, 96, dtype), weight(20, 96, dtype), torch.randn(68).to(dtype)

    def rounded(given: Tensor, kind: Kind) -> Given:
        return Given(unpack(quantise(kind, given)).to(dtype))

    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = scheme.linear([Given(a, q8_blocks(a)), Given(b)], bias)
    assert isinstance(layer, DenseLinear)
    assert torch.equal(layer.apply(x), dense.linear([rounded(a, kind), rounded(b, kind)], bias).apply(x))
    pieces = [rounded(a, Kind.ROTATED), rounded(b, Kind.ROTATED)]
    table, tokens = scheme.table([Given(a), Given(b)], tied=True), torch.tensor([3, 60, 3], dtype=torch.int32)
    assert isinstance(table, DenseTable)
    assert torch.equal(table.lookup(tokens), torch.cat([piece.weight for piece in pieces])[tokens])
    for head in (table.head(50), scheme.head([Given(a), Given(b)], 50)):
        assert torch.equal(head.apply(x), dense.head(pieces, 50).apply(x))
