"""What is added to logits and what is forbidden by token: logit_bias, allowed_token_ids, min_tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bough.base.plan import RowInit
from bough.device.platform.copies import to_device
from bough.worker.sampling.base import SampleContext, Tensor

FORBIDDEN = float("-inf")


class LogitBias:
    """Adds ``logit_bias``; a RowState. The values are finite and bounded, so a bias alone forbids nothing."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def add(self, row: int, init: RowInit) -> None:
        bias = init.params.logit_bias
        if bias:
            self.rows[row] = np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """The bias does not depend on what was sampled."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                ids, values = self.rows[row]
                logits[i, to_device(ids, logits.device)] += to_device(values, logits.device)


class AllowedTokens:
    """Forbids everything but ``allowed_token_ids``; a RowState."""

    def __init__(self) -> None:
        self.rows: dict[int, NDArray[np.int64]] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.params.allowed_token_ids:
            self.rows[row] = np.array(init.params.allowed_token_ids, np.int64)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """What is allowed does not depend on what was sampled."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                ids = to_device(self.rows[row], logits.device)
                kept = logits[i, ids]
                logits[i] = FORBIDDEN
                logits[i, ids] = kept


class MinTokens:
    """Forbids the end-of-sequence and stop ids until ``min_tokens`` tokens were generated; a RowState."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, NDArray[np.int64]]] = {}

    def add(self, row: int, init: RowInit) -> None:
        ends = (*init.eos_ids, *init.params.stop_token_ids)
        if ends and init.params.min_tokens > 0:
            self.rows[row] = init.n_prompt + init.params.min_tokens, np.array(ends, np.int64)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """The number of generated tokens follows from the position."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                until, ids = self.rows[row]
                if context.positions[i] < until:
                    logits[i, to_device(ids, logits.device)] = FORBIDDEN
