"""Random weights in the shapes that a config implies, for measurements without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bough.device.layers.context import LayerContext
from bough.device.quant.base import Blocks, Parameter

Tensor = torch.Tensor

SPREAD = 0.02
"""Standard deviation, as checkpoints are initialised with."""


class DummyContext(LayerContext):
    """Makes every parameter on the device instead of reading it; the source is not asked for any."""

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        self._count(name, shape)
        # Norms scale: around 0 they would silence the model.
        return self._random(shape, dtype or self.dtype) + (1 if "norm" in name else 0)

    def _weight(self, name: str, shape: tuple[int, int]) -> Parameter:
        self._count(name, shape)
        return _Random(self, shape)

    def _pieces(self, name: str, shape: tuple[int, int]) -> Sequence[Parameter]:
        return [self._weight(name, shape)]

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device).normal_(0.0, SPREAD)


@dataclass(frozen=True, slots=True)
class _Random:
    """A :class:`bough.device.quant.base.Parameter` that is made when it is read."""

    context: DummyContext
    shape: tuple[int, int]

    def dense(self) -> Tensor:
        return self.context._random(self.shape, self.context.dtype)

    def blocks(self) -> Blocks | None:
        return None
