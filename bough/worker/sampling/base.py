"""What the sampler's features have in common: each owns its per-row state and touches only its rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import RowInit

Tensor = torch.Tensor


NOBODY = np.empty(0, np.int64)


@dataclass(slots=True)
class SampleContext:
    """The rows of one sampling step; S of them, in the order of the logits.

    Attributes:
        rows: [S] row of each.
        positions: [S] int64 index in the sequence of the token that is about to be chosen.
        masked: [N] int64 indices, rising, of the rows whose ids are restricted.
        masks: [N, ceil(V / 32)] int32, see :class:`bough.base.plan.Masks`; None where no row is.
    """

    rows: list[int]
    positions: NDArray[np.int64]
    masked: NDArray[np.int64] = field(default_factory=lambda: NOBODY)
    masks: Tensor | None = None

    def alone(self, i: int) -> SampleContext:
        """The context of row i by itself."""
        at = np.flatnonzero(self.masked == i)
        masks = self.masks[torch.from_numpy(at)] if self.masks is not None and len(at) else None
        return SampleContext([self.rows[i]], self.positions[i : i + 1], np.zeros(len(at), np.int64), masks)


class RowState(Protocol):
    """A feature of sampling that keeps something per row."""

    @property
    def rows(self) -> Collection[int]:
        """The rows that asked for the feature."""
        ...

    def add(self, row: int, init: RowInit) -> None:
        """Take in a row; do nothing if its parameters do not ask for the feature."""
        ...

    def remove(self, row: int) -> None:
        """Forget the row, whether or not it was taken in."""
        ...

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        """Change ``logits`` ([S, V] float32) in place, in the rows that asked for the feature only.

        Does not change the feature's own state, so that a step can be sampled again.
        """
        ...

    def accept(self, row: int, token: int) -> None:
        """Note that ``token`` was sampled for ``row``."""
        ...
