"""Linear layers with weights of 4 and 8 bits against the values that the weights stand for."""

from __future__ import annotations

import pytest
import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import (
    FOUR_BITS,
    PAIRED,
    Kind,
    PackedWeight,
    pack_bf16,
    pack_groups,
    pack_int8,
    unpack,
)
from bough.device.ops.quantise import quantise
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from bough.device.ops.triton.linear import fp8_linear
from bough.device.quant.mxfp4 import pack_floats

from .conftest import DEVICE

Tensor = torch.Tensor
REFERENCE = ReferenceOps("the twin")


def make_weight(kind: Kind, n_out: int, n_in: int, group: int = 32) -> PackedWeight:
    """Random integers and scales of a kind."""
    g = torch.Generator().manual_seed(int(kind))

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=g, dtype=torch.uint8)

    if kind == Kind.BF16:
        return pack_bf16(torch.randn(n_out, n_in, generator=g).bfloat16())
    if kind == Kind.INT8:
        return pack_int8(integers(255, n_out, n_in) + 1, torch.rand(n_out, generator=g) / 100)
    q = integers(16 if kind in FOUR_BITS else 64 if kind == Kind.Q6_K else 256, n_out, n_in)
    wide = 256 if kind in (Kind.Q4_K, Kind.Q6_K) else group
    shape = (n_out, -(-n_in // wide), 2) if kind in PAIRED else (n_out, -(-n_in // wide))
    scale = (torch.rand(shape, generator=g) / 10).half()
    if kind == Kind.Q4_ZERO:
        scale[..., 1] = torch.randint(0, 16, scale[..., 1].shape, generator=g).half()
    if kind not in (Kind.Q4_K, Kind.Q6_K):
        return pack_groups(kind, q, scale, group=group)
    return pack_groups(kind, q, scale, integers(256, n_out, -(-n_in // 32), 2))


KINDS = [kind for kind in Kind if kind not in (Kind.ROTATED, Kind.Q4_WHOLE)]
"""What there are kernels for."""


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
@pytest.mark.parametrize("rows", [3, 40])
def test_packed_linear(ops: Ops, kind: Kind, rows: int) -> None:
    n_in, n_out = 288, 50
    weight = make_weight(kind, n_out, n_in)
    bias, x = torch.randn(n_out).bfloat16(), torch.randn(rows, n_in).bfloat16()
    exact = x.double() @ unpack(weight).double().T + bias.double()
    out = ops.packed_linear(weight, bias.to(DEVICE))(x.to(DEVICE)).cpu()
    magnitude = x.double().abs() @ unpack(weight).double().abs().T
    # bfloat16 weights and sums; INT8 also rounds the inputs, in both the specification and here.
    assert ((out.double() - exact).abs() <= (2**-7 if kind == Kind.INT8 else 2**-8) * magnitude + 1e-3).all()
    assert (out.double() - exact).pow(2).mean().sqrt() < 0.02 * exact.pow(2).mean().sqrt()
    wide = torch.zeros(rows, 70, dtype=torch.bfloat16, device=DEVICE)
    ops.packed_linear(weight, None)(x.to(DEVICE), wide[:, 10 : 10 + n_out])
    assert not wide[:, :10].any() and not wide[:, 60:].any()
    assert ((wide[:, 10:60].cpu().double() - exact + bias.double()).abs() <= 2**-7 * magnitude + 1e-3).all()


@pytest.mark.parametrize("kind", [Kind.Q4_MIN, Kind.Q8, Kind.Q4_ZERO], ids=lambda k: k.name)
def test_wider_groups_and_odd_shapes(ops: Ops, kind: Kind) -> None:
    weight = make_weight(kind, 33, 200, group=128)
    x = torch.randn(5, 200)
    out = ops.packed_linear(weight, None)(x.to(DEVICE)).cpu()
    exact = x.double() @ unpack(weight).double().T
    assert torch.allclose(out.double(), exact, rtol=1e-3, atol=2e-2)


def test_a_transformed_weight_is_refused(ops: Ops) -> None:
    with pytest.raises(ValueError, match="CPU"):
        ops.packed_linear(quantise(Kind.ROTATED, torch.randn(20, 64)), None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_packed_rows(ops: Ops, kind: Kind) -> None:
    weight, ids = make_weight(kind, 50, 512), torch.tensor([49, 0, 17, 17], dtype=torch.int32)
    scale, sub = (None if t is None else t.to(DEVICE) for t in (weight.scale, weight.sub))
    moved = PackedWeight(kind, 50, 512, weight.weight.to(DEVICE), scale, sub, weight.group)
    out = ops.packed_rows(moved, ids.to(DEVICE), torch.float32).cpu()
    assert torch.equal(out, REFERENCE.packed_rows(weight, ids, torch.float32))


@pytest.mark.parametrize("group", [0, 128])
def test_fp8_linear(ops: Ops, group: int) -> None:
    x, weight, bias = torch.randn(5, 288).bfloat16(), torch.randn(64, 288), torch.randn(64).bfloat16()
    held, values = fp8_weight(weight, bias, group)
    inputs = ops.round_rows(x.to(DEVICE), torch.float8_e4m3fn)
    out = fp8_linear(inputs, held).cpu()
    assert out.dtype == x.dtype
    exact = x.double() @ values.T + bias.double()
    assert (out.double() - exact).pow(2).mean().sqrt() < 0.05 * exact.pow(2).mean().sqrt()
    rounded = inputs.data.cpu().double() * inputs.scale.cpu().double()
    assert torch.allclose(out.double(), rounded @ values.T + bias.double(), rtol=2e-2, atol=2e-2)


def fp8_weight(weight: Tensor, bias: Tensor | None, group: int) -> tuple[HeldWeight, Tensor]:
    """With a scale for each output, or for each ``group`` of its inputs; and its values in float64."""
    n_out, n_in = weight.shape
    size = group or n_in
    blocks = torch.nn.functional.pad(weight.float(), (0, -n_in % size)).view(n_out, -1, size)
    scale = blocks.abs().amax(-1) / 448
    data = (blocks / scale[..., None]).flatten(1)[:, :n_in].to(torch.float8_e4m3fn)
    values = data.double() * scale.double().repeat_interleave(size, 1)[:, :n_in]
    held = HeldWeight(data.to(DEVICE), None if bias is None else bias.to(DEVICE), scale.to(DEVICE), group=group)
    return held, values


def test_integers_that_are_4_bit_floats_take_4_bits(ops: Ops) -> None:
    codes = torch.randint(0, 16, (33, 3, 32), dtype=torch.uint8)
    weight = pack_floats(codes, torch.randint(120, 130, (33, 3), dtype=torch.uint8))
    assert weight is not None and weight.kind == Kind.Q8
    apply = ops.packed_linear(weight, None)
    assert apply.stored is not None and apply.stored.form == "fp4" and apply.stored.weight.shape == (33, 48)
    x = torch.randn(5, 96)
    exact = x.double() @ unpack(weight).double().T
    assert torch.allclose(apply(x.to(DEVICE)).cpu().double(), exact, rtol=1e-5, atol=1e-4)
    other = make_weight(Kind.Q8, 33, 96)
    assert ops.packed_linear(other, None).stored.form == "8"
