"""Low-rank updates: equal to merged weights, different adapters in one batch, bits that depend on the row alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError
from bough.base.plan import NO_ADAPTER
from bough.device.lora.pool import MAX_RANK, AdaptedLayer, AdapterPool
from bough.device.lora.updates import LowRank
from bough.device.ops.registry import Ops
from tests.device.test_packed import randn

Tensor = torch.Tensor

DTYPES = [torch.float32, torch.bfloat16]


pytestmark = pytest.mark.usefixtures("poisoned", "two_threads")


def low_rank(rank: int, n_in: int, n_out: int, seed: int, scale: float = 2.0) -> LowRank:
    return LowRank(randn(rank, n_in, seed=seed) / n_in**0.5, randn(n_out, rank, seed=seed + 1000) / rank**0.5, scale)


def adapters(sizes: Sequence[int], n_in: int, ranks: Sequence[int]) -> list[dict[str, LowRank]]:
    """One for each rank; each leaves another part alone where there are several."""
    parts = [
        {f"p{i}": low_rank(rank, n_in, size, 10 * j + i) for i, size in enumerate(sizes)}
        for j, rank in enumerate(ranks)
    ]
    for j, modules in enumerate(parts):
        if len(sizes) > 1:
            del modules[f"p{j % len(sizes)}"]
    return parts


def held(ops: Ops, dtype: torch.dtype, sizes: Sequence[int], n_in: int, given: Sequence[dict[str, LowRank]],
         ) -> tuple[AdapterPool, AdaptedLayer]:  # fmt: skip
    pool = AdapterPool(ops, dtype, len(given))
    layer = pool.layer([(f"p{i}", size) for i, size in enumerate(sizes)], n_in)
    for place, modules in enumerate(given):
        pool.install(place, modules)
    return pool, layer


def exact(x: Tensor, modules: dict[str, LowRank], sizes: Sequence[int]) -> Tensor:
    """The update of all rows by merged weights, in float64."""
    merged = [
        m.b.double() @ m.a.double() * m.scale if (m := modules.get(f"p{i}")) else torch.zeros(size, x.shape[1]).double()
        for i, size in enumerate(sizes)
    ]
    return x.double() @ torch.cat(merged).T


SHAPES = [((64,), 64), ((48, 16, 16), 96), ((100, 100), 34), ((17, 5, 300), 50), ((7,), 9)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "n_in"), SHAPES, ids=str)
@pytest.mark.parametrize("rank", [1, 8, 16, 40, MAX_RANK])
def test_updates_equal_merged_weights(ops: Ops, dtype: torch.dtype, sizes: tuple[int], n_in: int, rank: int) -> None:
    given = adapters(sizes, n_in, [rank])
    pool, layer = held(ops, dtype, sizes, n_in, given)
    for n in (1, 5, 100):
        x, before = randn(n, n_in, dtype), randn(n, sum(sizes), dtype, seed=3)
        pool.plan([0], [n])
        out = layer(x, before.clone())
        expected = before.double() + exact(x, given[0], sizes)
        tolerance = 0.03 if dtype == torch.bfloat16 else 1e-5
        assert ((out.double() - expected).abs() <= tolerance * expected.abs().max()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_of_adapters_equals_runs_of_one(ops: Ops, dtype: torch.dtype) -> None:
    """16 rows over 8 adapters and none, of all kinds of lengths, bit by bit."""
    sizes, n_in = (48, 16, 16), 64
    pool, layer = held(ops, dtype, sizes, n_in, adapters(sizes, n_in, [4, 8, 16, 17, 32, 64, 100, 256]))
    places = [0, 3, 3, NO_ADAPTER, 7, 1, 2, 4, 5, 6, 0, 0, NO_ADAPTER, 2, 7, 3]
    counts = [1, 1, 3, 2, 1, 60, 1, 7, 1, 1, 100, 1, 1, 1, 2, 5]
    x, before = randn(sum(counts), n_in, dtype), randn(sum(counts), sum(sizes), dtype, seed=3)
    pool.plan(places, counts)
    assert pool.places is not None and pool.places.tolist() == [p for p, n in zip(places, counts) for _ in range(n)]
    whole, first = layer(x, before.clone()), 0
    for place, count in zip(places, counts):
        rows = slice(first, first + count)
        pool.plan([place], [count])
        alone = layer(x[rows].contiguous(), before[rows].clone())
        assert torch.equal(alone, whole[rows])
        assert torch.equal(alone, before[rows]) == (place == NO_ADAPTER)
        first += count


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=3), n_in=st.integers(1, 100), rank=st.integers(1, 64),
    counts=st.lists(st.integers(1, 60), min_size=1, max_size=6), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape(ops: Ops, sizes: list[int], n_in: int, rank: int, counts: list[int], seed: int) -> None:
    given = [{f"p{i}": low_rank(rank, n_in, size, seed + i) for i, size in enumerate(sizes)} for _ in range(2)]
    pool, layer = held(ops, torch.bfloat16, sizes, n_in, given)
    places = [(i + seed) % 3 - 1 for i in range(len(counts))]
    pool.plan(places, counts)
    x = randn(sum(counts), n_in, torch.bfloat16, seed)
    around = torch.full((sum(counts), sum(sizes)), 0.0, dtype=torch.bfloat16)
    out, updates = layer(x, around), exact(x, given[0], sizes)
    updates[torch.tensor(places).repeat_interleave(torch.tensor(counts)) == NO_ADAPTER] = 0
    # Roundings of weights and of what lies between the products, of sums that may cancel out.
    size = exact(x.abs(), {k: LowRank(m.a.abs(), m.b.abs(), m.scale) for k, m in given[0].items()}, sizes)
    assert ((out.double() - updates).abs() <= 0.02 * size + 1e-6).all()


def test_places_change_hands(ops: Ops) -> None:
    sizes, n_in = (32, 32), 32
    first, second = adapters(sizes, n_in, [8, 16])
    pool, layer = held(ops, torch.bfloat16, sizes, n_in, [first, {"p0": low_rank(4, 32, 32, 5)}])
    x, zero = randn(3, n_in, torch.bfloat16), torch.zeros(3, 64, dtype=torch.bfloat16)
    pool.plan([0], [3])
    before = layer(x, zero.clone())
    pool.install(0, second)
    pool.plan([0], [3])
    after = layer(x, zero.clone())
    assert not torch.equal(before, after)
    pool.clear(0)
    pool.plan([0], [3])
    assert torch.equal(layer(x, zero.clone()), zero)
    pool.install(0, first)
    pool.plan([0], [3])
    assert torch.equal(layer(x, zero.clone()), before)


def test_an_adapter_that_does_not_fit_changes_nothing(ops: Ops) -> None:
    sizes, n_in = (32, 16), 32
    given = adapters(sizes, n_in, [8])
    pool, layer = held(ops, torch.bfloat16, sizes, n_in, given)
    x, zero = randn(3, n_in, torch.bfloat16), torch.zeros(3, 48, dtype=torch.bfloat16)
    pool.plan([0], [3])
    before = layer(x, zero.clone())
    for modules, match in [
        ({"p0": low_rank(4, 32, 32, 1), "other": low_rank(4, 32, 32, 1)}, "no linear layer"),
        ({"p0": low_rank(4, 31, 32, 1)}, "shapes"), ({"p1": low_rank(4, 32, 32, 1)}, "shapes"),
        ({"p1": LowRank(randn(4, 32), randn(16, 5), 1.0)}, "shapes"), ({}, "rank 0"),
        ({"p0": low_rank(MAX_RANK + 1, 32, 32, 1)}, "rank 257"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            pool.install(0, modules)
    pool.plan([0], [3])
    assert torch.equal(layer(x, zero.clone()), before)
