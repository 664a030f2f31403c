"""Linear layers with unquantised weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from bough.device.ops.registry import Ops

Tensor = torch.Tensor

PACKED_ROWS = 16
"""Rows for which oneDNN is asked to lay out a weight; the layout serves every number of rows."""


class DenseLinear:
    """``x weight^T + bias`` in the weight's dtype.

    * float32, and anything with the reference ops: a row's result does not depend on the other rows, bit by bit
      (:meth:`bough.device.ops.registry.Ops.linear`).
    * bfloat16 otherwise: oneDNN on a weight in oneDNN's own layout, which at few rows is two to four times faster
      than on the plain one. The kernel that it picks depends on the number of rows, so results may differ in the
      last bit between batches.
    * bfloat16 where torch has no oneDNN: torch's own.

    The original weight is not kept, unless it is the form in use.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: Ops) -> None:
        """weight [out, in], bias [out] or None."""
        self._apply: Callable[[Tensor], Tensor]
        if ops.name == "reference" or weight.dtype == torch.float32:
            self._apply = ops.linear(weight, bias)
        elif has_packed_linear(weight):
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
            self._apply = partial(_packed_linear, packed, bias)
        else:
            self._apply = lambda x: functional.linear(x, weight, bias)

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        return self._apply(x)


def dense_linear(ops: Ops) -> Callable[[Tensor, Tensor | None], DenseLinear]:
    """The way to make linear layers of a model: (weight, bias) -> method."""
    return partial(DenseLinear, ops=ops)


def has_packed_linear(weight: Tensor) -> bool:
    """Whether oneDNN can hold the weight in its own layout on this machine."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed_linear(packed: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out
