"""Linear layers: several projections of one input fused into one weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.device.layers.context import LayerContext

Tensor = torch.Tensor


class Linear:
    """``x W^T + b`` where W stacks the weights of one or more Hugging Face parameters by rows."""

    def __init__(self, context: LayerContext, parts: Sequence[tuple[str, int]], in_features: int, bias: bool) -> None:
        """``parts`` are (parameter name without suffix, output features), in the order of the outputs."""
        weights = [context.parameter(f"{name}.weight", (rows, in_features)) for name, rows in parts]
        biases = [context.parameter(f"{name}.bias", (rows,)) for name, rows in parts] if bias else []
        self._method = context.linear(_stack(weights), _stack(biases) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, sum of outputs]."""
        return self._method.apply(x)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
