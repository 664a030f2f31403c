"""The compact form of bfloat16 weights: nothing is lost, and products have the bits of the whole form's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.device.ops import compact as compact_module
from bough.device.ops import pages
from bough.device.ops.compact import READERS, Compactor, CompactWeight, expand
from bough.device.ops.cpu import CpuOps
from bough.device.ops.library import Library
from bough.device.ops.packed import pack_bf16
from bough.device.quant.packed import first_outputs

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.usefixtures("poisoned", "two_threads"),
    pytest.mark.parametrize("library", READERS, indirect=True),
]


def gaussian(n_out: int, n_in: int, strays: int = 0, seed: int = 0) -> Tensor:
    """A weight as models have them, with so many values anywhere that are any bits at all."""
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(n_out, n_in, generator=g) / 50).bfloat16()
    at = torch.randint(0, weight.numel(), (strays,), generator=g)
    weight.view(torch.int16).view(-1)[at] = torch.randint(-(2**15), 2**15, (strays,), generator=g).to(torch.int16)
    return weight


def with_zeros(weight: Tensor, share: float) -> Tensor:
    """With so many of both signs."""
    g = torch.Generator().manual_seed(2)
    kept = torch.rand(weight.shape, generator=g) >= share
    return weight.where(kept, torch.zeros_like(weight).copysign(weight))


def compact_of(library: Library, weight: Tensor) -> CompactWeight | None:
    return Compactor(library, None)(pack_bf16(weight))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("n_out", [1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("n_in", [8, 24, 576])
def test_no_bit_is_lost(library: Library, n_out: int, n_in: int) -> None:
    weight = gaussian(n_out, n_in, strays=n_out * n_in // 500)
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, n_out), weight)


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38])
def test_any_value_may_be_a_stray(library: Library, value: float) -> None:
    weight = gaussian(40, 64)
    weight[3, 5] = weight[39, 63] = weight[16, 0] = value
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, 40), weight)


def test_the_codes_are_those_of_most_values(library: Library) -> None:
    """A few large values do not push the small ones out."""
    weight = gaussian(16, 576)
    weight[0, :8] = 2.0**100
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, 16), weight)


def test_zeros_have_a_code_where_there_are_many(library: Library) -> None:
    """Of both signs."""
    weight = with_zeros(gaussian(64, 576), 0.02)
    few, many = weight[:16], weight[16:]
    few[few == 0] = 0.01
    few[0, 100:120] = (2.0 ** torch.arange(-20, 0)).bfloat16()
    many[0, :4] = torch.tensor([1e-40, -1e-40, 2.0**-126, -(2.0**-126)])
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, 64), weight)
    assert (compact.table.view(4, 2, 16)[:, 0, 0] == 0).tolist() == [False, True, True, True]
    assert (compact.table.view(4, 2, 16)[:, 1, 0] == -(2**15)).tolist() == [False, True, True, True]


def test_what_fills_a_panel_up_does_not_count(library: Library) -> None:
    """Zeros, or the outputs behind those that a head is asked for."""
    weight = gaussian(17, 576)
    weight[weight == 0] = 0.01
    weight[16, :20] = (2.0 ** torch.arange(-20, 0)).bfloat16()
    weight[16, 30] = 0
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, 17), weight)
    assert (compact.table[:, 0] != 0).all(), "one zero is less than there are values of the first code"
    weight[16, :40] = 0
    compact = compact_of(library, weight)
    assert compact is not None and same_bits(expand(compact, 17), weight)
    assert (compact.table[:, 0] != 0).tolist() == [True, False], "zeros of the weight itself do"
    others = gaussian(11, 576, seed=1) * 2.0**-60
    compact = Compactor(library, None)(first_outputs(pack_bf16(torch.cat((weight[:5], others))), 5))
    assert compact is not None and same_bits(expand(compact, 5), weight[:5])


def test_what_has_no_codes_leaves_no_memory_behind(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_module, "CHUNK", pages.CHUNK)  # under the sanitizer nothing else is in the arena
    g = torch.Generator().manual_seed(1)
    anything = torch.randint(-(2**15), 2**15, (32, 64), generator=g).to(torch.int16).view(torch.bfloat16)
    compactor, weights, made = Compactor(library, None), [gaussian(64, 128, seed=i) for i in range(3)], []
    for weight in weights:
        assert compactor(pack_bf16(anything)) is None
        made.append(compactor(pack_bf16(weight)))
    assert all(m is not None and same_bits(expand(m, 64), w) for m, w in zip(made, weights, strict=True))
    places = [m.words.data_ptr() for m in made if m is not None]
    assert [place - places[0] for place in places] == [0, 64 * 128 * 3 // 2, 64 * 128 * 3]


def test_a_weight_of_many_exponents_stays_as_it_is(library: Library) -> None:
    g = torch.Generator().manual_seed(1)
    anything = torch.randint(-(2**15), 2**15, (32, 64), generator=g).to(torch.int16).view(torch.bfloat16)
    assert compact_of(library, anything) is None
    assert compact_of(library, torch.zeros(16, 64).bfloat16()) is not None


def test_inputs_that_fill_no_unit_and_other_kernels_have_no_compact_form(library: Library) -> None:
    assert compact_of(library, gaussian(16, 12)) is None
    library.set_isa("avx2")
    assert compact_of(library, gaussian(16, 64)) is None


def test_forms_take_no_more_bytes_than_there_are(library: Library) -> None:
    weight = pack_bf16(gaussian(16, 64))
    compact = Compactor(library, spare=lambda: 2 * 1536 + 100)
    assert [compact(weight) is None for _ in range(3)] == [False, False, True]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_out=st.integers(1, 150),
    units=st.integers(1, 40),
    rows=st.integers(1, 14),
    strays=st.integers(0, 12),
    odd=st.sampled_from([0.0, -(2.0**-120), 1e-40, 2.0**-20, 2.0**20, -(2.0**20), torch.nan, torch.inf]),
    zeros=st.sampled_from([0, 0.03, 0.9]),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
def test_products_have_the_same_bits(
    library: Library, n_out: int, units: int, rows: int, strays: int, odd: float, zeros: float, seed: int, threads: int
) -> None:
    weight = with_zeros(gaussian(n_out, 8 * units, 0, seed), zeros)
    g = torch.Generator().manual_seed(seed)
    weight.view(-1)[torch.randint(0, weight.numel(), (strays,), generator=g)] = odd
    packed = pack_bf16(weight)
    plain, compact = CpuOps(library, "the twin", spare=lambda: 0), CpuOps(library, "under test")
    bias = torch.randn(n_out, generator=g)
    x = torch.randn(rows, 8 * units, generator=g).bfloat16()
    torch.set_num_threads(threads)
    assert same_bits(compact.packed_linear(packed, bias)(x), plain.packed_linear(packed, bias)(x))


@pytest.mark.parametrize("zeros", [0, 0.02])
def test_every_value_by_itself_has_the_same_bits(library: Library, zeros: float) -> None:
    """Of groups that are smaller than their panel by any power of two; among them what differs from zero by its code or
    its mantissa alone: powers of two, and what is next to nothing."""
    weight = with_zeros(gaussian(16, 1280), zeros)
    weight *= (2.0 ** -(torch.arange(20) % 6)).repeat_interleave(64).bfloat16()
    for row in (1, 3):
        weight[row, 4::64] = (2.0 ** -torch.arange(8.0, 28)).roll(row).bfloat16()
        weight[row, 5::64] = -weight[row, 4::64] * 1.5
    weight[7, :256:64] = torch.tensor([1e-40, -1e-39] * 2)
    packed, one_hot = pack_bf16(weight), torch.eye(1280)
    assert compact_of(library, weight) is not None
    plain = CpuOps(library, "the twin", spare=lambda: 0).packed_linear(packed, None)
    compact = CpuOps(library, "under test").packed_linear(packed, None)
    for rows in (1, 6, 12):
        assert all(torch.equal(compact(part), plain(part)) for part in one_hot.split(rows))


MOST_ROWS = {"avx512": 4, "avx512vnni": 12, "avx512bf16": 6, "avx512bf16x2": 8}


def test_the_compact_form_is_what_few_rows_read(library: Library) -> None:
    """Seen by products with a whole form that was overwritten."""
    most = MOST_ROWS[library.isa()]
    weight, x = pack_bf16(gaussian(64, 128, strays=5)), torch.randn(most, 128).bfloat16()
    linear = CpuOps(library, "under test").packed_linear(weight, None)
    before = linear(x)
    weight.weight.zero_()
    for rows in range(1, most + 1):
        assert torch.equal(linear(x[:rows]), before[:rows])
    assert not linear(torch.ones(most + 1, 128).bfloat16()).any()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_out=st.integers(1, 200),
    n_in=st.one_of(st.integers(1, 300), st.sampled_from([95, 96, 97, 192, 577])),
    rows=st.integers(30, 90),
    seed=st.integers(0, 99),
    threads=st.integers(1, 3),
)
def test_many_rows_have_the_bits_of_few(
    library: Library, n_out: int, n_in: int, rows: int, seed: int, threads: int
) -> None:
    """Of inputs that are taken apart some at a time, and of outputs that fill no pass."""
    g = torch.Generator().manual_seed(seed)
    linear = CpuOps(library, "under test").packed_linear(pack_bf16(gaussian(n_out, n_in, 0, seed)), None)
    x = torch.randn(rows, n_in, generator=g).bfloat16()
    torch.set_num_threads(threads)
    assert torch.equal(linear(x), torch.cat([linear(part) for part in x.split(5)]))
