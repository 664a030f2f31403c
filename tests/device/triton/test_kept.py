"""Checkpoints in 8-bit floats, multiplied as they are where a device can."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.registry import Ops
from bough.device.quant.dense import DenseLinear
from bough.device.quant.fp8 import Fp8Linear
from bough.device.quant.scheme import resolve_scheme

from .conftest import DEVICE
from .test_linear import fp8_weight

Tensor = torch.Tensor


@dataclass
class Kept:
    """A parameter in 8-bit floats."""

    stored: HeldWeight | None
    values: Tensor

    def dense(self) -> Tensor:
        return self.values.to(DEVICE, torch.float32)

    def blocks(self) -> HeldWeight | None:
        return self.stored


@pytest.mark.parametrize("group", [0, 128])
def test_layers_are_multiplied_as_they_are_held(ops: Ops, group: int) -> None:
    scheme = resolve_scheme("auto", ops, torch.float32, ("fp8",))
    parts = [Kept(*fp8_weight(torch.randn(n, 288), None, group)) for n in (64, 32)]
    bias, x = torch.randn(96), torch.randn(5, 288)
    layer = scheme.linear(parts, bias.to(DEVICE))
    assert isinstance(layer, Fp8Linear) and layer.rounded.takes == torch.float8_e4m3fn
    rows = ops.round_rows(x.to(DEVICE), torch.float8_e4m3fn)
    rounded = rows.data.cpu().double() * rows.scale.cpu().double()
    exact = rounded @ torch.cat([part.values for part in parts]).T + bias.double()
    out = layer.apply(x.to(DEVICE)).cpu()
    assert torch.allclose(out.double(), exact, rtol=1e-2, atol=1e-2)
    assert torch.equal(layer.rounded(rows).cpu(), out)


def test_what_does_not_go_together_is_widened(ops: Ops) -> None:
    scheme = resolve_scheme("auto", ops, torch.float32, ("fp8",))
    kept = Kept(*fp8_weight(torch.randn(64, 288), None, 0))
    blocks = Kept(*fp8_weight(torch.randn(64, 288), None, 128))
    odd = Kept(*fp8_weight(torch.randn(63, 288), None, 0))
    plain = Kept(None, torch.randn(64, 288))
    for parts in ([kept, blocks], [kept, plain], [odd], [plain]):
        layer = scheme.linear(parts, None)
        assert isinstance(layer, DenseLinear)
        x = torch.randn(3, 288)
        exact = x.double() @ torch.cat([part.values.double() for part in parts]).T
        assert torch.allclose(layer.apply(x.to(DEVICE)).cpu().double(), exact, rtol=1e-3, atol=1e-3)
    assert isinstance(resolve_scheme("auto", ops, torch.float32, ()).linear([kept], None), DenseLinear)
    rounding = resolve_scheme("fp8", ops, torch.float32, ("fp8",))
    assert isinstance(rounding.linear([plain], None), Fp8Linear)
    assert isinstance(rounding.linear([odd], None), DenseLinear)
