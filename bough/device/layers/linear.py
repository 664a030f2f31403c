"""Linear layers: several projections of one input fused into one weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.device.layers.context import LayerContext
from bough.device.ops.library import PackedLinear
from bough.device.ops.rounded import RoundedRows, Rows

Tensor = torch.Tensor


class Linear:
    """``x W^T + b`` where W stacks the weights of one or more Hugging Face parameters by rows.

    Attributes:
        adapted: what adapters add to it; None where the model takes none.
        takes: what inputs may come rounded to; None: they come as they are, which adapters need.
    """

    def __init__(self, context: LayerContext, parts: Sequence[tuple[str, int]], in_features: int, bias: bool) -> None:
        """``parts`` are (parameter name without suffix, output features), in the order of the outputs."""
        biases = [context.parameter(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        weights = [(f"{name}.weight", rows) for name, rows in parts]
        self._method = context.linear(weights, in_features, torch.cat(biases) if bias else None)
        self.adapted = context.adapted(parts, in_features)
        rounded = self._method.rounded
        self.takes = None if rounded is None or self.adapted is not None else rounded.takes

    @property
    def parts(self) -> Sequence[PackedLinear]:
        """See :class:`bough.device.quant.base.LinearMethod`."""
        return self._method.parts

    def __call__(self, x: Rows) -> Tensor:
        """[T, in] -> [T, sum of outputs]."""
        if isinstance(x, RoundedRows):
            assert self._method.rounded is not None
            return self._method.rounded(x)
        out = self._method.apply(x)
        return out if self.adapted is None else self.adapted(x, out)
