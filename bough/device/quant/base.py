"""The seam between linear layers and how their weights are held."""

from __future__ import annotations

from typing import Protocol

import torch

Tensor = torch.Tensor


class LinearMethod(Protocol):
    """Owns the weight of one linear layer, in whatever form multiplies fastest."""

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        ...
