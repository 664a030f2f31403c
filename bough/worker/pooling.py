"""Vectors made of hidden states, for rows that do not generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.params import Pooling
from bough.base.plan import RowInit

Tensor = torch.Tensor


@dataclass(slots=True)
class _Row:
    """``sum`` is that of the hidden states so far, for a mean; ``first`` the first of them."""

    kind: Pooling
    length: int
    sum: Tensor | None = None
    first: Tensor | None = None


class Pooler:
    """Follows the pooled rows chunk by chunk."""

    def __init__(self) -> None:
        self.rows: dict[int, _Row] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.pooling is not None:
            self.rows[row] = _Row(init.pooling.kind, len(init.ids))

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def take(
        self, row: int, start: int, hidden: Tensor, scores: Callable[[Tensor], Tensor]
    ) -> NDArray[np.float32] | None:
        """The vector of ``row`` if its last token is among the new ones.

        Args:
            row: a pooled row.
            start: position of the first new token.
            hidden: [n_new, D] last hidden states of the row's new tokens.
            scores: the classification head, [n_new, D] of the last step -> [labels].

        Raises ValueError where the vector is not finite.
        """
        state = self.rows[row]
        if state.kind == "mean":
            chunk = hidden.float().sum(0)
            state.sum = chunk if state.sum is None else state.sum + chunk
        elif state.kind == "first" and state.first is None:
            # A copy: a captured step computes the next hidden states over these.
            state.first = hidden[0].to(torch.float32, copy=True)
        if start + len(hidden) < state.length:
            return None
        if state.kind == "classify":
            pooled = scores(hidden).float()
        elif state.sum is not None:
            pooled = state.sum / state.length
        else:
            pooled = hidden[-1].float() if state.first is None else state.first
        if not bool(torch.isfinite(pooled).all()):
            raise ValueError("the vector is not finite")
        return np.array(pooled.cpu().numpy(), np.float32)
