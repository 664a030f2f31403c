"""bfloat16 as whole numbers: against the slow twin, in both forms of weights; next to nothing is lost by it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.ops.compact import READERS as COMPACT_READERS
from bough.device.ops.compact import Compactor
from bough.device.ops.cpu import CpuOps
from bough.device.ops.fixed import INPUTS, READERS, exponents, fixed_inputs, fixed_weights
from bough.device.ops.library import Library
from bough.device.ops.packed import from_panels, pack_bf16

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.usefixtures("poisoned", "two_threads"),
    pytest.mark.parametrize("library", READERS, indirect=True),
]


def randn(n: int, dim: int, seed: int) -> Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def product(library: Library, weight: Tensor, x: Tensor) -> Tensor:
    return CpuOps(library, "under test").packed_linear(pack_bf16(weight.bfloat16()), None)(x.float())


def close(out: Tensor, weight: Tensor, x: Tensor) -> bool:
    """Within the roundings of float32 sums of what is multiplied."""
    bound = 2e-7 * (x.double().abs() @ weight.double().abs().T) * (2 + weight.shape[1] / INPUTS) + 1e-30
    return bool(((out.double() - x.double() @ weight.double().T).abs() <= bound).all())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_out=st.integers(1, 150),
    n_in=st.one_of(st.integers(1, 400), st.sampled_from([63, 64, 65, 127, 128, 1536])),
    rows=st.integers(1, 45),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
    odd=st.sampled_from([0.0, 1e-41, 1e-30, 1e12]),
    seed=st.integers(0, 999),
)
def test_products_are_those_of_the_twin(
    library: Library, n_out: int, n_in: int, rows: int, spread: float, odd: float, seed: int
) -> None:
    """Of values of some or of many sizes, with zeros, and what is far larger or smaller than the others."""
    weight = (randn(n_out, n_in, seed) * torch.exp(spread * randn(n_out, n_in, seed + 1))).bfloat16()
    x = (randn(rows, n_in, seed + 2) * torch.exp(spread * randn(rows, n_in, seed + 3))).bfloat16()
    places = torch.Generator().manual_seed(seed)
    for part in (weight, x):
        part.view(-1)[torch.randint(0, part.numel(), (1 + part.numel() // 300,), generator=places)] = odd
        group = int(torch.randint(0, -(-n_in // INPUTS), (1,), generator=places)) * INPUTS
        part[torch.randint(0, len(part), (1,), generator=places), group : group + INPUTS] = 0
    out = product(library, weight, x)
    assert close(out, fixed_weights(weight, library.isa()), fixed_inputs(x))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("odd", [0.0, -0.0, -1e-41, 3e-38, -(2.0**-125), 1.5, -(2.0**30)])
def test_the_compact_form_gives_those_of_the_twin_too(library: Library, rows: int, odd: float) -> None:
    """With values that have no code, or are the largest of their group by far."""
    weight, x = (randn(70, 1280, rows) * 2.0**40 / 50).bfloat16(), randn(rows, 1280, rows + 1).bfloat16()
    weight.view(-1)[:: 70 * 1280 // 40] = odd
    weight[3, 128:192] = 0
    if library.isa() in COMPACT_READERS:
        assert Compactor(library, None)(pack_bf16(weight)) is not None
    assert close(product(library, weight, x), fixed_weights(weight, library.isa()), fixed_inputs(x))


@pytest.mark.parametrize("rows", [1, 2, 4, 6, 7, 12, 13, 50])
def test_what_is_no_32_times_smaller_loses_nothing(library: Library, rows: int) -> None:
    """Values of 8 bits, which reach from the largest of their group to a 32nd of it."""
    g = torch.Generator().manual_seed(rows)

    def some(n: int) -> Tensor:
        size = 2.0 ** torch.randint(0, 6, (n, 640), generator=g) * torch.randint(128, 256, (n, 640), generator=g)
        size[:, ::INPUTS] = 255 * 32
        return size * (1 - 2 * torch.randint(0, 2, (n, 640), generator=g))

    weight, x = some(80), some(rows)
    out = product(library, weight, x).double()
    exact = x.double() @ weight.double().T
    assert ((out - exact).abs() <= 1e-6 * (x.double().abs() @ weight.double().abs().T)).all()
    few = torch.zeros(rows, 640)
    few[:, 70:72] = x[:, 70:72]
    assert torch.equal(product(library, weight, few), few @ weight.T)


@pytest.mark.parametrize("rows", [5, 9, 40])
@pytest.mark.parametrize(("inputs", "most"), [("normal", 0.06), ("outliers", 0.5), ("positive", 0.1), ("mean", 0.1)])
def test_less_is_lost_than_by_rounding_inputs(library: Library, rows: int, inputs: str, most: float) -> None:
    """Where some are far larger, as those of models are, their group is rounded by them; where inputs have a mean, what
    is lost of weights does not add up."""
    weight, x = randn(96, 8192, 1).bfloat16(), randn(rows, 8192, 2)
    if inputs == "outliers":
        x[:, ::700] *= 300
    x = x.relu() if inputs == "positive" else x + 1 if inputs == "mean" else x
    exact = x.double() @ weight.double().T
    rounded = x.bfloat16().double() @ weight.double().T
    lost = product(library, weight, x.bfloat16()).double() - rounded
    assert lost.norm() < most * (rounded - exact).norm()


@pytest.mark.parametrize("rows", [1, 3, 7, 13, 60])
@pytest.mark.parametrize("value", [1.0, -1.9921875, 3e30])
def test_the_largest_sums_fit(library: Library, rows: int, value: float) -> None:
    """All weights of a group as large as the largest, with the largest inputs."""
    weight = torch.full((40, 256), value).bfloat16()
    weight[::3] *= -1
    x = torch.full((rows, 256), 1.9921875 if abs(value) < 2 else 1e-4).bfloat16()
    x[1::2] *= -1
    assert close(product(library, weight, x), weight, x)


def test_exponents_are_what_the_largest_and_their_sums_ask_for(library: Library) -> None:
    weight = randn(70, 200, 3).bfloat16()
    weight[5, :64] = 1.9921875  # such a sum of magnitudes takes one bit more
    weight[6, 64:128] = 0
    weight[7, 130] = torch.inf
    found = exponents(library, pack_bf16(weight))
    assert found is not None
    by_group = from_panels(found, 70).int()
    top = torch.nn.functional.pad(weight.float(), (0, 56)).view(70, 4, 64).abs().amax(2)
    expected = (127 + 13 - torch.frexp(top).exponent).clamp(max=247)
    expected[5, 0] -= 1
    expected[6, 1] = 247
    expected[7, 2] = 255
    assert torch.equal(by_group, expected)


@pytest.mark.parametrize("rows", [1, 8, 14])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_where_it_belongs(library: Library, rows: int, value: float) -> None:
    weight, x = randn(40, 192, 4).bfloat16(), randn(rows, 192, 5).bfloat16()
    expected = product(library, weight, x)
    bad = x.clone()
    bad[0, 100] = value
    out = product(library, weight, bad)
    assert out[0].isnan().all() and torch.equal(out[1:], expected[1:])
    bad = weight.clone()
    bad[17, 70] = value
    out = product(library, bad, x)
    assert out[:, 17].isnan().all()
    others = torch.arange(40) != 17
    assert torch.equal(out[:, others], expected[:, others])


def test_other_kernels_have_no_exponents(library: Library) -> None:
    library.set_isa("generic")
    assert exponents(library, pack_bf16(randn(16, 64, 6).bfloat16())) is None
