"""Linear layers with weights in the model's dtype that are not packed: float32, the reference, and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.packed import Kind, unpack
from bough.device.ops.registry import Ops
from bough.device.quant.base import LinearMethod, Parameter

Tensor = torch.Tensor


class DenseLinear:
    """``x weight^T + bias`` in the weight's dtype.

    On a CPU a row's result does not depend on the other rows, bit by bit: see
    :meth:`bough.device.ops.registry.Ops.linear`, which compiled kernels have for float32 only. On CUDA it is cuBLAS's.

    The original weight is not kept, unless it is the form in use.
    """

    parts: Sequence[PackedLinear] = ()
    rounded = None

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight [out, in], bias [out] or None."""
        self.stored = HeldWeight(weight, bias) if ops.name == "triton" else None
        self._apply = ops.linear(weight, bias)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        return self._apply(x)


class DenseTable:
    """An embedding in the model's dtype; a head copies it into the layout that multiplies fastest."""

    packed = None

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        self._weight, self._ops = weight, ops

    def lookup(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, D], a new tensor."""
        return torch.nn.functional.embedding(tokens, self._weight)

    def head(self, n_ids: int) -> LinearMethod:
        """The linear layer of the first ``n_ids`` rows."""
        return DenseLinear(self._weight[:n_ids], None, self._ops)


@dataclass(frozen=True, slots=True)
class Rounded:
    """A :class:`bough.device.quant.base.Parameter` with the values that ``kind`` holds of it, in the model's dtype."""

    parameter: Parameter
    kind: Kind
    ops: Ops

    def dense(self) -> Tensor:
        weight = self.parameter.dense()
        return unpack(self.ops.quantise(self.kind, weight.contiguous())).to(weight.dtype)

    def blocks(self) -> None:
        return None


class DenseScheme:
    """Weights in the model's dtype."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        weights = [parameter.dense() for parameter in parameters]
        return DenseLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias, self._ops)

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        return DenseLinear(stacked(pieces)[:n_ids], None, self._ops)

    def table(self, pieces: Sequence[Parameter], tied: bool) -> DenseTable:
        return DenseTable(stacked(pieces), self._ops)


class RoundedScheme:
    """Weights rounded once, while they are loaded, to what packed ones stand for, and held in the model's dtype.

    Without kernels nothing multiplies packed weights: they would be decoded for every product. Inputs are not rounded.
    """

    def __init__(self, kind: Kind, head: Kind, ops: Ops) -> None:
        """``kind`` is that of the layers, ``head`` that of embedding and head."""
        self._kind, self._head, self._ops = kind, head, ops
        self._dense = DenseScheme(ops)

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        return self._dense.linear(self._rounded(parameters, self._kind), bias)

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        return self._dense.head(self._rounded(pieces, self._head), n_ids)

    def table(self, pieces: Sequence[Parameter], tied: bool) -> DenseTable:
        return self._dense.table(self._rounded(pieces, self._head), tied)

    def _rounded(self, parameters: Sequence[Parameter], kind: Kind) -> list[Rounded]:
        return [Rounded(parameter, kind, self._ops) for parameter in parameters]


def stacked(pieces: Sequence[Parameter]) -> Tensor:
    """The whole weight; one piece at a time is held beside it."""
    first = pieces[0].dense()
    if len(pieces) == 1:
        return first
    # The last piece may be shorter than the others: memory that nobody touches is none.
    whole = first.new_empty(len(pieces) * len(first), first.shape[1])
    end = 0
    for i, piece in enumerate(pieces):
        rows = first if i == 0 else piece.dense()
        whole[end : end + len(rows)] = rows
        end += len(rows)
    return whole[:end]
