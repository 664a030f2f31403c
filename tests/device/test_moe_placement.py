"""Experts that adapters change, one after another, on a device of their own: only the host knows whose a token is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bough.base.plan import NO_ADAPTER
from bough.device.layers.moe import Expert, Experts
from bough.device.lora.pool import AdapterPool
from bough.device.lora.updates import LowRank
from bough.device.ops.experts import HeldWeight
from bough.device.ops.reference import ReferenceOps

from .elsewhere import Elsewhere

Tensor = torch.Tensor

HIDDEN, INNER, N_EXPERTS = 12, 8, 3


class Method:
    """:class:`bough.device.quant.base.LinearMethod` of one weight."""

    parts: tuple[()] = ()
    rounded = None
    stored: HeldWeight | None = None

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def apply(self, x: Tensor) -> Tensor:
        return x @ self._weight.T


def output(place: type[Elsewhere] | None) -> Tensor:
    """Of tokens with two adapters and with none; all that a device has is where ``place`` puts it."""
    g = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=g)
        return made if place is None else place(made)

    ops = ReferenceOps("under test")
    pool = AdapterPool(ops, torch.float32, 2)
    context: Any = SimpleNamespace(adapters=pool, ops=ops, capturable=True)
    experts = [
        Expert(
            Method(random(2 * INNER, HIDDEN)), Method(random(HIDDEN, INNER)),
            pool.layer([(f"{e}.gate", INNER), (f"{e}.up", INNER)], HIDDEN), pool.layer([(f"{e}.down", HIDDEN)], INNER),
        )
        for e in range(N_EXPERTS)
    ]  # fmt: skip
    layer = Experts(context, experts, HIDDEN, INNER)
    for adapter in range(2):
        up, down = (random(4, HIDDEN), random(INNER, 4)), (random(2, INNER), random(HIDDEN, 2))
        pool.install(adapter, {f"{adapter}.up": LowRank(*up, 2.0), f"{adapter + 1}.down": LowRank(*down, 1.0)})
    pool.plan([0, NO_ADAPTER, 1, 0], [2, 3, 4, 1])
    ids = torch.stack([torch.randperm(N_EXPERTS, generator=g)[:2] for _ in range(10)]).int()
    return layer(random(10, HIDDEN), ids if place is None else place(ids), random(10, 2)).cpu()


def test_experts_with_adapters() -> None:
    assert torch.equal(output(Elsewhere), output(None))


def test_a_device_of_its_own_is_not_the_host() -> None:
    far, near = Elsewhere(torch.arange(6.0)), torch.arange(6)
    assert torch.equal(far[near].cpu(), far.held) and float((far * 2.0).sum()) == 30.0
    with pytest.raises(AssertionError, match="two devices"):
        far + near
    with pytest.raises(AssertionError, match="two devices"):
        near[Elsewhere(near)]
