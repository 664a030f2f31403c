"""Grouped products of experts against float64, one token after another."""

from __future__ import annotations

import pytest
import torch

from bough.device.ops.experts import Clamp, Dense, ExpertParts
from bough.device.ops.registry import Ops

from .conftest import DEVICE

Tensor = torch.Tensor
CLAMP = Clamp(1.702, 7.0)


class Case:
    """Experts of random weights, tokens, and their experts; ``only``: those that any token chooses."""

    def __init__(
        self, n: int, n_experts: int, k: int, sizes: tuple[int, int], dtype: torch.dtype, bias: bool = False,
        only: int = 0,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(n)
        hidden, inner = self.sizes = sizes

        def dense(n_out: int, n_in: int) -> Dense:
            weight = (torch.randn(n_out, n_in, generator=g) / n_in**0.5).to(dtype)
            return Dense(weight.to(DEVICE), torch.randn(n_out, generator=g).to(dtype).to(DEVICE) if bias else None)

        self.experts = [(dense(2 * inner, hidden), dense(hidden, inner)) for _ in range(n_experts)]
        self.x = torch.randn(n, hidden, generator=g).to(dtype)
        chosen = [torch.randperm(only or n_experts, generator=g)[:k] for _ in range(n)]
        self.ids = torch.stack(chosen).int() if n else torch.zeros(0, k, dtype=torch.int32)
        self.weights = torch.rand(n, k, generator=g)

    def exact(self, clamp: Clamp | None) -> Tensor:
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for t, (ids, weights) in enumerate(zip(self.ids.tolist(), self.weights.tolist())):
            for e, weight in zip(ids, weights):
                wide = [[None if p is None else p.cpu().double() for p in part] for part in self.experts[e]]
                (up, up_bias), (down, down_bias) = wide
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
        op = ops.experts([ExpertParts((), (), dense) for dense in self.experts], self.sizes, clamp)
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


@pytest.mark.parametrize("clamp", [None, CLAMP])
def test_biases_and_the_other_activation(ops: Ops, clamp: Clamp | None) -> None:
    case = Case(6, 5, 2, (33, 24), torch.float32, bias=True)
    case.x *= 20
    exact = case.exact(clamp)
    assert (case.run(ops, clamp).double() - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_weights_are_held_once(ops: Ops) -> None:
    case = Case(3, 4, 2, (32, 16), torch.float32)
    before = [part.weight.clone() for dense in case.experts for part in dense]
    case.run(ops)
    parts = [part.weight for dense in case.experts for part in dense]
    assert all(torch.equal(a, b) for a, b in zip(before, parts))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 2


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    case = Case(3, 4, 2, (32, 16), torch.float32)
    assert ops.experts([ExpertParts((), ())], (32, 16), None) is None
    assert Case(0, 4, 2, (32, 16), torch.float32).run(ops).shape == (0, 32)
    case.weights = case.weights.double()
    with pytest.raises(ValueError, match="experts"):
        case.run(ops)
