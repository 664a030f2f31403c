"""Inputs of linear layers in 8 bits: rounded alone, by the norm or the activation before them, and in a whole model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.lora.pool import AdapterPool
from bough.device.ops.packed import Kind
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from bough.device.ops.rounded import LARGEST, RoundedRows
from bough.device.ops.triton import elementwise
from bough.device.quant.base import LinearMethod, Parameter, Scheme
from bough.device.quant.packed import PackedMethod
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from tests.driving import Driver, Sequence_, device_parts, make_driver

from ..exact import exact_norm, randn
from .conftest import DEVICE
from .test_linear import make_weight
from .test_model import LOGPROBS, capture, logprobs

Tensor = torch.Tensor
REFERENCE = ReferenceOps("the twin")
TARGETS = [torch.int8, torch.float8_e4m3fn]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 1), (5, 7), (4, 1000), (2, 1024), (2, 1025)]


def values(rows: RoundedRows) -> Tensor:
    """float64 [T, K], what the rows stand for."""
    return rows.data.cpu().double() * rows.scale.cpu().double()


def bits(rows: RoundedRows) -> tuple[Tensor, Tensor, torch.dtype]:
    return rows.data.cpu().view(torch.uint8), rows.scale.cpu().view(torch.int32), rows.dtype


def same(a: RoundedRows, b: RoundedRows) -> bool:
    (data, scale, dtype), (others, other_scale, other) = bits(a), bits(b)
    return torch.equal(data, others) and torch.equal(scale, other_scale) and dtype == other


def unit(exact: Tensor, target: torch.dtype) -> Tensor:
    """Half the distance of neighbours around ``exact``."""
    top = exact.abs().amax(1, keepdim=True)
    return top / 127 / 2 if target == torch.int8 else exact.abs() * 2**-4 + top * 2**-16


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ops", ["triton", "reference"], indirect=True)
def test_round_rows(ops: Ops, dtype: torch.dtype, target: torch.dtype) -> None:
    x = randn(4, 300, dtype=dtype) * torch.tensor([[1e-2], [1.0], [50.0], [1.0]]).to(dtype)
    x[3] = 0.0
    rounded = ops.round_rows(x.to(DEVICE), target)
    assert rounded.data.dtype == target and rounded.scale.shape == (4, 1) and rounded.dtype == dtype
    assert ((values(rounded) - x.double()).abs() <= unit(x.double(), target) * 1.001 + 1e-12).all()
    x[1, 7], x[2, 8] = torch.nan, torch.inf
    scale = ops.round_rows(x.to(DEVICE), target).scale
    assert scale.isfinite().flatten().tolist() == [True, False, False, True]


@pytest.fixture
def ops(request: pytest.FixtureRequest) -> Ops:
    if getattr(request, "param", "triton") == "reference":
        return REFERENCE
    from bough.device.ops.triton.ops import TritonOps

    return TritonOps(DEVICE, "under test")


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_that_rounds(ops: Ops, shape: tuple[int, int], dtype: torch.dtype, target: torch.dtype) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype, seed=1)
    for factor in (weight, weight.float()):
        mine = ops.rms_norm_rounded(x.to(DEVICE), None, factor.to(DEVICE), 1e-5, target)
        twin = ops.round_rows(ops.rms_norm(x.to(DEVICE), factor.to(DEVICE), 1e-5), target)
        assert same(mine, twin)
        exact = exact_norm(x, factor, 1e-5)
        near = 4 * torch.finfo(dtype).eps * exact.abs().amax(1, keepdim=True)
        assert ((values(mine) - exact).abs() <= unit(exact, target) * 1.01 + near + 1e-12).all()
    residual = randn(*shape, dtype=dtype, seed=2)
    kept, other = residual.to(DEVICE, copy=True), residual.to(DEVICE, copy=True)
    mine = ops.rms_norm_rounded(x.to(DEVICE), kept, weight.to(DEVICE), 1e-6, target)
    assert same(mine, ops.round_rows(ops.add_rms_norm(x.to(DEVICE), other, weight.to(DEVICE), 1e-6), target))
    assert torch.equal(kept.cpu(), x + residual), "the residual stream is changed in place, and not rounded to 8 bits"
    specified = REFERENCE.rms_norm_rounded(x, residual.clone(), weight, 1e-6, target)
    exact = exact_norm(x + residual, weight, 1e-6)
    near = 8 * torch.finfo(dtype).eps * exact.abs().amax(1, keepdim=True)
    assert ((values(mine) - values(specified)).abs() <= 2 * unit(exact, target) * 1.01 + near + 1e-12).all()


WIDE = [(3, 1), (5, 7), (2, elementwise.CHUNK), (1, 2 * elementwise.CHUNK + 1)]


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(
    ("shape", "dtype"), [*zip(WIDE, [*DTYPES, torch.bfloat16]), ((4, 1000), torch.float32)], ids=str
)
def test_an_activation_that_rounds(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype, target: torch.dtype, gelu: bool
) -> None:
    n, dim = shape
    x = randn(n, 2 * dim, dtype=dtype) * 2
    mine = ops.gated_rounded(x.to(DEVICE), gelu, target)
    assert same(mine, ops.round_rows((ops.gelu_mul if gelu else ops.silu_mul)(x.to(DEVICE)), target))
    gate, up = x.double().chunk(2, -1)
    exact = up * (torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate))
    near = 4 * torch.finfo(dtype).eps * exact.abs().amax(1, keepdim=True) + 1e-6
    assert ((values(mine) - exact).abs() <= unit(exact, target) * 1.01 + near).all()


def test_rows_that_are_not_finite_or_nothing(ops: Ops) -> None:
    for target in TARGETS:
        x, weight = randn(4, 2100).to(DEVICE), torch.ones(2100, device=DEVICE)
        x[0], x[1, 2000], x[2, 5] = 0.0, torch.nan, torch.inf
        rounded = ops.rms_norm_rounded(x, None, weight, 1e-5, target)
        assert rounded.scale.isfinite().flatten().tolist() == [True, False, False, True]
        assert not values(rounded)[0].any()
        x = randn(4, 2 * 5000).to(DEVICE)
        x[0], x[1, 4999], x[2, 5000] = 0.0, torch.nan, torch.inf
        rounded = ops.gated_rounded(x, False, target)
        assert rounded.scale.isfinite().flatten().tolist() == [True, False, False, True]
        assert not values(rounded)[0].any()
        for nothing in (ops.rms_norm_rounded(x[:0], None, x[0], 1e-5, target), ops.gated_rounded(x[:0], True, target)):
            assert len(nothing) == 0 and nothing.data.dtype == target


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 64, 1023, 1024])
def test_nothing_else_is_written(dim: int, target: torch.dtype) -> None:
    n, guard = 3, 2048
    x, weight = randn(n, 2 * dim).to(DEVICE), torch.ones(dim, device=DEVICE)
    how = {"LARGEST": LARGEST[target], "BLOCK": elementwise.next_power(dim)}
    for kind in ("norm", "gated"):
        out = torch.full((guard + n * dim + guard,), 0x55, dtype=torch.uint8, device=DEVICE)
        scales = torch.full((guard + n + guard,), torch.nan, device=DEVICE)
        to = out[guard:].view(target), scales[guard:]
        if kind == "norm":
            first = x[:, :dim].contiguous()
            elementwise.rms_norm_kernel[(n,)](first, first, weight, *to, dim, 1e-5, ADD=False, **how)
            right = elementwise.rms_norm_rounded(first, None, weight, 1e-5, target)
        else:
            elementwise.gated_rounded_kernel[(n,)](x, *to, dim, GELU=False, **how)
            right = elementwise.gated_rounded(x, False, target)
        inside = slice(guard, guard + n * dim)
        assert torch.equal(out[inside].view(n, dim).cpu(), right.data.view(torch.uint8).cpu())
        assert (out[:guard] == 0x55).all() and (out[guard + n * dim :] == 0x55).all()
        assert torch.equal(scales[guard : guard + n].cpu(), right.scale[:, 0].cpu())
        assert scales[:guard].isnan().all() and scales[guard + n :].isnan().all()


def test_layers_of_several_weights_round_once(ops: Ops) -> None:
    x = torch.randn(5, 288).bfloat16().to(DEVICE)
    weights = [make_weight(Kind.INT8, 50, 288), make_weight(Kind.INT8, 33, 288)]
    bias = torch.randn(83).bfloat16().to(DEVICE)
    both = PackedMethod(weights, bias, ops)
    assert both.rounded is not None and both.rounded.takes == torch.int8
    parts = [ops.packed_linear(w, b)(x) for w, b in zip(weights, (bias[:50], bias[50:]))]
    assert torch.equal(both.apply(x), torch.cat(parts, dim=1))
    assert torch.equal(both.rounded(ops.round_rows(x, torch.int8)), both.apply(x))
    mixed = PackedMethod([weights[0], make_weight(Kind.Q8, 50, 288)], None, ops)
    assert mixed.rounded is None and mixed.apply(x).isfinite().all()


class Unrounded:
    """A scheme whose layers have to be given their inputs as they are."""

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self.head, self.table = scheme.head, scheme.table

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        return _Unrounded(self._scheme.linear(parameters, bias))


class _Unrounded:
    rounded = None

    def __init__(self, method: LinearMethod) -> None:
        self.parts, self.apply = method.parts, method.apply


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("rounded"), spread=0.15)


def driver_of(checkpoint: Path, quantize: str, unrounded: bool, how: Any) -> Driver:
    ops, scheme, attention, dtype, device = device_parts("triton", torch.float32, quantize)
    source = open_checkpoint(checkpoint)
    context = LayerContext(source, ops, Unrounded(scheme) if unrounded else scheme, attention, dtype, device)
    sizes = WorkerSizes(n_ids=1 << 20, context_length=64, n_rows=2)
    built = build_worker(source.config, context, sizes, KVConfig(pool_tokens=64), lambda: 1 << 40, capture=how)
    source.close()
    return Driver(built.worker, built.pool_tokens)


def answers(driver: Driver) -> list[Sequence_]:
    """A prompt in two pieces, and one that comes while the other is answered."""
    first, second = driver.add(0, list(range(5, 14)), LOGPROBS), driver.add(1, [7, 8], LOGPROBS)
    driver.step((first, 6))
    driver.step((first, 0), (second, 0))
    for _ in range(2):
        driver.step((first, 1), (second, 1))
    return [first, second]


@pytest.mark.parametrize(
    ("quantize", "kernels"), [("int8", "captured"), pytest.param("fp8", "eager", marks=pytest.mark.slow)]
)
def test_who_rounds_changes_no_answer(checkpoint: Path, quantize: str, kernels: str) -> None:
    found = [
        answers(driver_of(checkpoint, quantize, unrounded, capture() if kernels == "captured" else None))
        for unrounded in (False, True)
    ]
    close = answers(make_driver(checkpoint, kernels="reference", n_rows=2, n_tokens=64))
    for mine, twin, right in zip(*found, close):
        assert mine.ids == twin.ids and not mine.failed
        assert logprobs(mine.logprobs) == logprobs(twin.logprobs)
        assert logprobs(mine.prompt_logprobs) == logprobs(twin.prompt_logprobs)
        # What 8 bits do to a model this small.
        a, b = torch.tensor(logprobs(mine.prompt_logprobs)), torch.tensor(logprobs(right.prompt_logprobs))
        assert (a - b).abs().max() < 0.5


def test_layers_that_adapters_change_take_inputs_as_they_are(checkpoint: Path) -> None:
    parts = [("model.layers.0.mlp.down_proj", 64)]
    for quantize, adapters, takes in (
        ("int8", False, torch.int8), ("fp8", False, torch.float8_e4m3fn), ("none", False, None), ("int8", True, None)
    ):  # fmt: skip
        ops, scheme, attention, dtype, device = device_parts("triton", torch.float32, quantize)
        source = open_checkpoint(checkpoint)
        pool = AdapterPool(ops, dtype, 1) if adapters else None
        context = LayerContext(source, ops, scheme, attention, dtype, device, pool)
        n_in = int(source.config["intermediate_size"])
        assert Linear(context, parts, n_in, False).takes == takes
        source.close()
