"""Presence, frequency and repetition penalties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import RowInit
from bough.device.ops.registry import Ops
from bough.device.platform.copies import to_device
from bough.worker.sampling.base import SampleContext, Tensor


class _Counts:
    """The distinct tokens of one row and how often each was generated.

    Arrays grow by doubling, so that a sampled token costs O(1). ``ids[:size]`` and ``counts[:size]`` are in use;
    a prompt token that was not generated has count 0.
    """

    def __init__(self, init: RowInit) -> None:
        params = init.params
        self.presence, self.frequency = params.presence_penalty, params.frequency_penalty
        self.repetition = params.repetition_penalty
        generated, counts = np.unique(init.ids[init.n_prompt :], return_counts=True)
        prompt = init.ids[: init.n_prompt] if self.repetition != 1.0 else init.ids[:0]
        unseen = np.setdiff1d(prompt, generated)
        self.ids: NDArray[np.int64] = np.concatenate((generated, unseen)).astype(np.int64)
        self.counts = np.concatenate((counts, np.zeros(len(unseen)))).astype(np.float32)
        self.size = len(self.ids)
        self.index = {token: i for i, token in enumerate(self.ids.tolist())}

    def accept(self, token: int) -> None:
        i = self.index.get(token)
        if i is None:
            if self.size == len(self.ids):
                room = max(16, self.size)
                self.ids = np.concatenate((self.ids, np.zeros(room, np.int64)))
                self.counts = np.concatenate((self.counts, np.zeros(room, np.float32)))
            i = self.index[token] = self.size
            self.ids[i], self.counts[i] = token, 0.0
            self.size += 1
        self.counts[i] += 1.0


class Penalties:
    """Penalties of tokens that occurred: a RowState.

    With c the number of times a token was generated: a positive logit of a token of the prompt or of the
    generated part is divided by ``repetition_penalty``, a negative one multiplied by it (CTRL, Keskar et al.
    2019); then ``frequency_penalty * c`` and, where c > 0, ``presence_penalty`` are subtracted (OpenAI's).
    """

    def __init__(self, ops: Ops) -> None:
        self.rows: dict[int, _Counts] = {}
        self._ops = ops

    def add(self, row: int, init: RowInit) -> None:
        p = init.params
        if p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0:
            self.rows[row] = _Counts(init)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        if row in self.rows:
            self.rows[row].accept(token)

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        found = [(i, self.rows[row]) for i, row in enumerate(context.rows) if row in self.rows]
        if not found:
            return
        sizes = [c.size for _, c in found]
        counts = np.concatenate([c.counts[: c.size] for _, c in found])

        def per_token(values: list[float]) -> NDArray[np.float32]:
            return np.repeat(np.array(values, np.float32), sizes)

        subtract = per_token([c.frequency for _, c in found]) * counts
        subtract += per_token([c.presence for _, c in found]) * (counts > 0)
        entries = np.stack((
            np.repeat(np.array([i for i, _ in found], np.int32), sizes),
            np.concatenate([c.ids[: c.size] for _, c in found]).astype(np.int32),
            per_token([c.repetition for _, c in found]).view(np.int32),
            subtract.view(np.int32),
        ))  # fmt: skip
        self._ops.penalise(logits, to_device(entries, logits.device))
