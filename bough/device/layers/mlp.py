"""The gated feed-forward layer."""

from __future__ import annotations

from typing import Literal

import torch

from bough.base.errors import ConfigError
from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.ops.rounded import Rows

Tensor = torch.Tensor

Activation = Literal["silu", "gelu"]
"""Of the gate; "gelu" in its tanh form."""

_ACTIVATIONS: dict[object, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
}  # fmt: skip


def activation_of(name: object) -> Activation:
    """The activation that a Hugging Face config calls ``name``; ConfigError for one that is not computed."""
    found = _ACTIVATIONS.get(name)
    if found is None:
        raise ConfigError(f"the activation {name!r} is not supported; {', '.join(map(str, _ACTIVATIONS))} are")
    return found


class GatedMLP:
    """``down(act(gate(x)) * up(x))`` with gate and up as one linear (Shazeer 2020).

    They are parameters ``gate_proj`` and ``up_proj``, or both of them ``gate_up_proj``.

    Attributes:
        gate_up, down: the projections.
        activation: of the gate.
        takes: as :class:`bough.device.layers.linear.Linear`.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        activation: Activation = "silu",
    ) -> None:
        gate_up = [(f"{prefix}.gate_proj", intermediate_size), (f"{prefix}.up_proj", intermediate_size)]
        if context.has(f"{prefix}.gate_up_proj.weight"):
            gate_up = [(f"{prefix}.gate_up_proj", 2 * intermediate_size)]
        self.gate_up = Linear(context, gate_up, hidden_size, bias)
        self.down = Linear(context, [(f"{prefix}.down_proj", hidden_size)], intermediate_size, bias)
        self.activation = activation
        self.takes = self.gate_up.takes
        self._ops = context.ops
        self._act_mul = context.ops.silu_mul if activation == "silu" else context.ops.gelu_mul

    def __call__(self, x: Rows) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        inner = self.gate_up(x)
        if self.down.takes is not None:
            return self.down(self._ops.gated_rounded(inner, self.activation == "gelu", self.down.takes))
        return self.down(self._act_mul(inner))
