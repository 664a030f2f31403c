"""Root mean square normalisation (Zhang and Sennrich 2019), and layer normalisation."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext

Tensor = torch.Tensor


class RMSNorm:
    """One norm with ``weight`` [D]; ``add`` fuses it with the residual stream."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float) -> None:
        self.weight = context.parameter(f"{name}.weight", (size,))
        self._eps = eps
        self._norm, self._add_norm = context.ops.rms_norm, context.ops.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, D], as a new tensor."""
        return self._norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; the norm of the new residual."""
        return self._add_norm(x, residual, self.weight, self._eps)


class LayerNorm:
    """Layer normalisation (Ba et al. 2016), with weight and bias."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float) -> None:
        self._weight = context.parameter(f"{name}.weight", (size,))
        self._bias = context.parameter(f"{name}.bias", (size,))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, D], as a new tensor."""
        return torch.nn.functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
