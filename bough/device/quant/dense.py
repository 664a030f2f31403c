"""Linear layers with unquantised weights that are not packed: float32, the reference, and oneDNN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.registry import Ops
from bough.device.quant.base import LinearMethod, Parameter

Tensor = torch.Tensor

PACKED_ROWS = 16
"""Rows for which oneDNN is asked to lay out a weight; the layout serves every number of rows."""


class DenseLinear:
    """``x weight^T + bias`` in the weight's dtype.

    * float32, and anything with the reference ops: a row's result does not depend on the other rows, bit by bit
      (:meth:`bough.device.ops.registry.Ops.linear`).
    * On CUDA: cuBLAS.
    * bfloat16 otherwise: oneDNN on a weight in oneDNN's own layout. The kernel that it picks depends on the number of
      rows, so results may differ in the last bit between batches.

    The original weight is not kept, unless it is the form in use.
    """

    parts: Sequence[PackedLinear] = ()
    rounded = None

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight [out, in], bias [out] or None."""
        self._apply: Callable[[Tensor], Tensor]
        self.stored = HeldWeight(weight, bias) if ops.name == "triton" else None
        if ops.name != "cpu" or weight.dtype == torch.float32:
            self._apply = ops.linear(weight, bias)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            self._apply = partial(_onednn_linear, packed, bias)

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


def _onednn_linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
