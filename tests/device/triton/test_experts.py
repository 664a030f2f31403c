"""Grouped products of experts against float64, one token after another."""

from __future__ import annotations

import pytest
import torch

from bough.device.ops.experts import Clamp, ExpertParts, HeldWeight
from bough.device.ops.packed import Kind, PackedWeight, unpack
from bough.device.ops.registry import Ops
from bough.device.ops.triton.experts import ROUTED
from bough.device.ops.triton.linear import multiply_rounded, packed_linear
from bough.device.quant.mxfp4 import pack_floats

from .conftest import DEVICE
from .test_linear import fp8_weight, make_weight

Tensor = torch.Tensor
CLAMP = Clamp(1.702, 7.0)


class Case:
    """Experts of random weights, tokens, and their experts; ``only``: those that any token chooses."""

    def __init__(
        self, n: int, n_experts: int, k: int, sizes: tuple[int, int], dtype: torch.dtype, bias: bool = False,
        only: int = 0, kind: Kind | str = "dense",
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(n)
        hidden, inner = self.sizes = sizes

        self._values: dict[int, list[tuple[Tensor, Tensor | None]]] = {}

        def make(e: int, n_out: int, n_in: int) -> HeldWeight:
            added = torch.randn(n_out, generator=g).to(dtype) if bias else None
            on_device = None if added is None else added.to(DEVICE)
            weight = (torch.randn(n_out, n_in, generator=g) / n_in**0.5).to(dtype)
            held: HeldWeight | None
            if kind == "dense":
                held, values = HeldWeight(weight.to(DEVICE), on_device), weight.double()
            elif isinstance(kind, str) and kind.startswith("fp8"):
                held, values = fp8_weight(weight, added, 128 if kind == "fp8 blocks" else 0)
            else:
                packed = make_floats(n_out, n_in, g) if isinstance(kind, str) else make_weight(kind, n_out, n_in)
                held, values = packed_linear(packed, on_device, DEVICE).stored, unpack(packed).double()
            assert held is not None
            self._values.setdefault(e, []).append((values, None if added is None else added.double()))
            return held

        self.experts = [(make(e, 2 * inner, hidden), make(e, hidden, inner)) for e in range(n_experts)]
        self.x = torch.randn(n, hidden, generator=g).to(dtype)
        chosen = [torch.randperm(only or n_experts, generator=g)[:k] for _ in range(n)]
        self.ids = torch.stack(chosen).int() if n else torch.zeros(0, k, dtype=torch.int32)
        self.weights = torch.rand(n, k, generator=g)

    def exact(self, clamp: Clamp | None) -> Tensor:
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist())):
            for e, weight in zip(ids, weights):
                (up, up_bias), (down, down_bias) = self._values[e]
                both = up @ self.x[t].double() + (0 if up_bias is None else up_bias)
                gate, value = both.chunk(2)
                if clamp is None:
                    inner = torch.nn.functional.silu(gate) * value
                else:
                    gate, value = gate.clamp(max=clamp.limit), value.clamp(-clamp.limit, clamp.limit)
                    inner = (value + 1) * gate * torch.sigmoid(clamp.alpha * gate)
                out[t] += weight * (down @ inner + (0 if down_bias is None else down_bias))
        return out

    def run(self, ops: Ops, clamp: Clamp | None = None) -> Tensor:
        op = ops.experts([ExpertParts((), (), held) for held in self.experts], self.sizes, clamp)
        assert op is not None
        return op(self.x.to(DEVICE), self.ids.to(DEVICE), self.weights.to(DEVICE)).cpu()


@pytest.mark.parametrize(("n", "n_experts", "k", "only"), [(5, 4, 2, 0), (1, 8, 8, 0), (40, 3, 1, 1), (70, 2, 2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weighted_sum_of_experts(
    ops: Ops, n: int, n_experts: int, k: int, only: int, dtype: torch.dtype
) -> None:  # fmt: skip
    case = Case(n, n_experts, k, (96, 40), dtype, only=only)
    exact, out = case.exact(None), case.run(ops)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= (2e-6 if dtype == torch.float32 else 2e-2) * exact.abs().max()


def test_more_pairs_than_are_sorted_at_once(ops: Ops) -> None:
    case = Case(ROUTED // 2 + 30, 3, 2, (16, 8), torch.float32)
    exact = case.exact(None)
    assert (case.run(ops).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_biases_and_the_other_activation(ops: Ops, clamp: Clamp | None) -> None:
    case = Case(6, 5, 2, (33, 24), torch.float32, bias=True)
    case.x *= 20
    exact = case.exact(clamp)
    assert (case.run(ops, clamp).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def make_floats(n_out: int, n_in: int, g: torch.Generator) -> PackedWeight:
    codes = torch.randint(0, 16, (n_out, n_in // 32, 32), dtype=torch.uint8, generator=g)
    packed = pack_floats(codes, torch.randint(121, 124, codes.shape[:2], dtype=torch.uint8, generator=g))
    assert packed is not None
    return packed


PACKED = [kind for kind in Kind if kind not in (Kind.BF16, Kind.INT8, Kind.ROTATED, Kind.Q4_WHOLE)]
ROUNDED = [Kind.INT8, "fp8", "fp8 blocks"]


@pytest.mark.parametrize("kind", [*PACKED, "fp4", *ROUNDED], ids=str)
@pytest.mark.parametrize("n", [3, 40])
def test_weights_of_fewer_bits(ops: Ops, n: int, kind: Kind | str) -> None:
    """Against what the weights stand for; where inputs are rounded, too, only about."""
    sizes = (256, 256) if kind in (Kind.Q4_K, Kind.Q6_K) else (288, 32)
    case = Case(n, 3, 2 if n < 10 else 1, sizes, torch.float32, bias=kind in ("fp4", "fp8 blocks", Kind.Q4), kind=kind)
    case.x /= 8
    clamp = CLAMP if kind == "fp4" else None
    exact, out = case.exact(clamp), case.run(ops, clamp)
    assert out.isfinite().all()
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < (0.06 if kind in ROUNDED else 2e-3)  # scales of 16 bits


@pytest.mark.parametrize("kind", ROUNDED, ids=str)
def test_rounded_rows_are_those_of_single_layers(ops: Ops, kind: Kind | str) -> None:
    """One expert of each token, one after another: what layers give for rows that are rounded as they come."""
    case = Case(6, 3, 1, (288, 32), torch.float32, kind=kind)
    expected = torch.zeros_like(case.x)
    for t, e in enumerate(case.ids[:, 0].tolist()):
        row = case.x[t : t + 1].to(DEVICE)
        for held, layer in zip(case.experts[e], ("up", "down")):
            rows = ops.round_rows(row, held.weight.dtype)
            row = multiply_rounded(rows, held, None)
            row = ops.silu_mul(row) if layer == "up" else row
        expected[t] = row[0].cpu() * case.weights[t]
    assert torch.allclose(case.run(ops), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_experts_that_are_held_in_different_ways_are_refused(ops: Ops) -> None:
    mine, others = (Case(3, 2, 1, (96, 32), torch.float32, kind=kind) for kind in (Kind.Q8, Kind.Q4))
    mixed = [ExpertParts((), (), mine.experts[0]), ExpertParts((), (), others.experts[0])]
    assert ops.experts(mixed, (96, 32), None) is None


def test_weights_are_held_once(ops: Ops) -> None:
    case = Case(3, 4, 2, (32, 16), torch.float32)
    before = [part.weight.clone() for held in case.experts for part in held]
    case.run(ops)
    parts = [part.weight for held in case.experts for part in held]
    assert all(torch.equal(a, b) for a, b in zip(before, parts))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 2


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    case = Case(3, 4, 2, (32, 16), torch.float32)
    assert ops.experts([ExpertParts((), ())], (32, 16), None) is None
    assert Case(0, 4, 2, (32, 16), torch.float32).run(ops).shape == (0, 32)
    case.weights = case.weights.double()
    with pytest.raises(ValueError, match="experts"):
        case.run(ops)
