"""What the sampler's features have in common: each owns its per-row state and touches only its rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import RowInit

Tensor = torch.Tensor


@dataclass(slots=True)
class SampleContext:
    """The rows of one sampling step; S of them, in the order of the logits.

    Attributes:
        rows: [S] row of each.
        positions: [S] int64 index in the sequence of the token that is about to be chosen.
    """

    rows: list[int]
    positions: NDArray[np.int64]


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
