"""Weights rounded to 8-bit floats when a model is loaded, multiplied with inputs rounded as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from bough.device.ops.library import PackedLinear
from bough.device.ops.rounded import LARGEST, RoundedRows
from bough.device.quant.base import LinearMethod, Parameter, Scheme, Table

Tensor = torch.Tensor

FP8 = torch.float8_e4m3fn


@runtime_checkable
class Fp8Ops(Protocol):
    """Ops of a device that multiplies 8-bit floats."""

    def fp8_linear(self, x: RoundedRows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, K] float8_e4m3fn times weight [N, K] float8_e4m3fn with scales [1, N]; plus ``bias`` [N]: [T, N] in
        the dtype that x was rounded from."""
        ...

    def round_rows(self, x: Tensor, dtype: torch.dtype) -> RoundedRows:
        """See :class:`bough.device.ops.registry.Ops`."""
        ...


class RoundedFp8:
    """A :class:`bough.device.quant.base.RoundedMethod` with one scale for each output, its largest magnitude at 448."""

    takes = FP8

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Fp8Ops) -> None:
        """weight [out, in], bias [out] or None."""
        wide = weight.float()
        scale = wide.abs().amax(1, keepdim=True) / LARGEST[FP8]
        self._weight = (wide / scale.where(scale > 0, 1.0)).to(FP8)
        self._scale, self._bias, self._ops = scale.T.contiguous(), bias, ops

    def __call__(self, x: RoundedRows) -> Tensor:
        """[T, in] -> [T, out], a new tensor."""
        return self._ops.fp8_linear(x, self._weight, self._scale, self._bias)


class Fp8Linear:
    """A :class:`bough.device.quant.base.LinearMethod` that rounds its inputs, where they do not come rounded."""

    parts: Sequence[PackedLinear] = ()

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Fp8Ops) -> None:
        """weight [out, in], bias [out] or None."""
        self.rounded = RoundedFp8(weight, bias, ops)
        self._ops = ops

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        return self.rounded(self._ops.round_rows(x, FP8))


class Fp8Scheme:
    """Layers in 8-bit floats; embedding and head, whose errors reach every token, as ``dense`` holds them."""

    def __init__(self, ops: Fp8Ops, dense: Scheme) -> None:
        self._ops, self._dense = ops, dense

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        return Fp8Linear(torch.cat([parameter.dense() for parameter in parameters]), bias, self._ops)

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        return self._dense.head(pieces, n_ids)

    def table(self, pieces: Sequence[Parameter], tied: bool) -> Table:
        return self._dense.table(pieces, tied)
