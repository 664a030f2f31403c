"""The gated feed-forward layer."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear

Tensor = torch.Tensor


class GatedMLP:
    """``down(silu(gate(x)) * up(x))`` with gate and up as one linear (Shazeer 2020).

    Attributes:
        gate_up, down: the projections.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, intermediate_size: int, bias: bool
    ) -> None:
        gate_up = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
        self.gate_up = Linear(context, gate_up, hidden_size, bias)
        self.down = Linear(context, [(f"{prefix}.down_proj", hidden_size)], intermediate_size, bias)
        self._silu_mul = context.ops.silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self._silu_mul(self.gate_up(x)))
