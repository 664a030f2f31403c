"""Updates of adapters in captured steps against the products that they stand for."""

from __future__ import annotations

import pytest
import torch

from bough.base.plan import NO_ADAPTER
from bough.device.ops.lora import CapturedLora, Update
from bough.device.ops.registry import Ops

from .conftest import DEVICE

Tensor = torch.Tensor


def update(sizes: list[int], n_in: int, rank: int, seed: int, left_alone: int = -1) -> Update:
    g = torch.Generator().manual_seed(seed)
    parts = [
        None if i == left_alone else (torch.randn(rank, n_in, generator=g), torch.randn(n, rank, generator=g) / rank)
        for i, n in enumerate(sizes)
    ]
    return Update([p and p[0] for p in parts], [p and p[1] for p in parts])


def exact(updates: dict[int, Update], places: list[int], x: Tensor, out: Tensor) -> Tensor:
    wide = out.double()
    for t, place in enumerate(places):
        if place in updates:
            parts = zip(updates[place].a, updates[place].b, wide[t].split(SIZES))
            for a, b, columns in parts:
                if a is not None and b is not None:
                    columns += b.to(x.dtype).double() @ (a.to(x.dtype).double() @ x[t].double())
    return wide


SIZES = [70, 16, 33]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_launched_serves_any_adapters(ops: Ops, dtype: torch.dtype) -> None:
    n_in, g = 300, torch.Generator().manual_seed(1)
    op = ops.lora(SIZES, n_in, 4, dtype)
    assert isinstance(op, CapturedLora)
    updates: dict[int, Update] = {}

    def check(asked: list[int]) -> None:
        x, out = (torch.randn(len(asked), n, generator=g).to(dtype) for n in (n_in, sum(SIZES)))
        mine = out.clone().to(DEVICE)
        op.add(torch.tensor(asked, dtype=torch.int32, device=DEVICE), x.to(DEVICE), mine)
        right = exact(updates, asked, x, out)
        assert (mine.cpu().double() - right).abs().max() < (
            2e-5 if dtype == torch.float32 else 2e-2
        ) * right.abs().max()

    check([NO_ADAPTER, 0])
    for place, rank, left_alone in ((0, 8, -1), (2, 17, 1), (3, 256, 0)):
        updates[place] = update(SIZES, n_in, rank, place, left_alone)
        op.set(place, updates[place])
    check([0, NO_ADAPTER, 3, 2, 2, 0])
    op.set(0, None)
    updates[2] = update(SIZES, n_in, 4, 9)
    op.set(2, updates[2])
    del updates[0]
    check([0, 2, 3])
