"""Weights rounded to 8-bit floats when a model is loaded, multiplied with inputs rounded as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.rounded import LARGEST, RoundedRows
from bough.device.quant.base import Held, LinearMethod, Parameter, Scheme, Table

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn

ALIGNED = 16
"""Inputs, and outputs, that cuBLAS takes in 8-bit floats are a multiple of as many."""


@runtime_checkable
class Fp8Ops(Protocol):
    """Ops of a device that multiplies 8-bit floats."""

    def fp8_linear(self, x: RoundedRows, weight: HeldWeight) -> Tensor:
        """x [T, K] float8_e4m3fn times a weight [N, K] float8_e4m3fn with its scales, plus its bias: [T, N] in the
        dtype that x was rounded from."""
        ...

    def round_rows(self, x: Tensor, dtype: torch.dtype) -> RoundedRows:
        """See :class:`bough.device.ops.registry.Ops`."""
        ...


class RoundedFp8:
    """A :class:`bough.device.quant.base.RoundedMethod` with scales for outputs, or for blocks of their inputs."""

    takes = FP8

    def __init__(self, stored: HeldWeight, ops: Fp8Ops) -> None:
        self.stored, self._ops = stored, ops

    def __call__(self, x: RoundedRows) -> Tensor:
        """[T, in] -> [T, out], a new tensor."""
        return self._ops.fp8_linear(x, self.stored)


class Fp8Linear:
    """A :class:`bough.device.quant.base.LinearMethod` that rounds its inputs, where they do not come rounded."""

    parts: Sequence[PackedLinear] = ()

    def __init__(self, stored: HeldWeight, ops: Fp8Ops) -> None:
        self.rounded, self.stored = RoundedFp8(stored, ops), stored
        self._ops = ops

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        return self.rounded(self._ops.round_rows(x, FP8))


def round_outputs(weight: Tensor, bias: Tensor | None) -> HeldWeight:
    """weight [out, in] with one scale for each output, its largest magnitude at 448."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True) / LARGEST[FP8]
    return HeldWeight((wide / scale.where(scale > 0, 1.0)).to(FP8), bias, scale)


class Fp8Scheme:
    """Layers in 8-bit floats; as ``dense`` holds them embedding and head, whose errors reach every token, and layers of
    sizes that the products do not take."""

    def __init__(self, ops: Fp8Ops, dense: Scheme) -> None:
        self._ops, self._dense = ops, dense

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        weight = torch.cat([parameter.dense() for parameter in parameters])
        if any(n % ALIGNED for n in weight.shape):
            return self._dense.linear([Held(weight)], bias)
        return Fp8Linear(round_outputs(weight, bias), self._ops)

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        return self._dense.head(pieces, n_ids)

    def table(self, pieces: Sequence[Parameter], tied: bool) -> Table:
        return self._dense.table(pieces, tied)


class KeptFp8Scheme:
    """Layers whose weights a checkpoint holds in 8-bit floats are multiplied as it holds them; ``others`` holds the
    rest, and weights whose sizes the device's products do not take."""

    def __init__(self, ops: Fp8Ops, others: Scheme) -> None:
        self._ops, self._others = ops, others
        self.head, self.table = others.head, others.table

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        found = [parameter.blocks() for parameter in parameters]
        parts = [part for part in found if isinstance(part, HeldWeight) and part.scale is not None]
        scales = [part.scale for part in parts if part.scale is not None]
        alike = len(parts) == len(found) and len({(part.group, s.shape[1]) for part, s in zip(parts, scales)}) == 1
        if not alike or any(n % ALIGNED for part in parts for n in part.weight.shape):
            return self._others.linear(parameters, bias)
        weight = torch.cat([part.weight for part in parts])
        return Fp8Linear(HeldWeight(weight, bias, torch.cat(scales), group=parts[0].group), self._ops)
