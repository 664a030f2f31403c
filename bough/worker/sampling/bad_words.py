"""Token sequences that may not be generated."""

from __future__ import annotations

import numpy as np

from bough.base.plan import RowInit
from bough.device.platform.copies import to_device
from bough.worker.sampling.base import SampleContext, Tensor
from bough.worker.sampling.bias import FORBIDDEN


class _Words:
    """The words of one row and as much of its generated tail as the longest of them needs."""

    def __init__(self, init: RowInit) -> None:
        self.words = init.params.bad_words
        self.reach = max(len(word) for word in self.words) - 1
        generated = init.ids[init.n_prompt :]
        self.tail: tuple[int, ...] = tuple(generated[max(0, len(generated) - self.reach) :].tolist())

    def accept(self, token: int) -> None:
        if self.reach:
            self.tail = (*self.tail, token)[-self.reach :]

    def forbidden(self) -> list[int]:
        """Last tokens of the words whose other tokens were just generated."""
        last = []
        for word in self.words:
            n = len(word) - 1
            if n == 0 or self.tail[-n:] == word[:n]:
                last.append(word[n])
        return last


class BadWords:
    """Forbids the token that would complete one of ``bad_words``; a RowState.

    Only generated tokens count as a word's beginning: a word that starts within the prompt is not one
    that is generated.
    """

    def __init__(self) -> None:
        self.rows: dict[int, _Words] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.params.bad_words:
            self.rows[row] = _Words(init)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        if row in self.rows:
            self.rows[row].accept(token)

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                forbidden = self.rows[row].forbidden()
                if forbidden:
                    logits[i, to_device(np.array(forbidden), logits.device)] = FORBIDDEN
