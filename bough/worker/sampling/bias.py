"""What is added to logits and what is forbidden by token: logit_bias, allowed_token_ids, min_tokens."""

from __future__ import annotations

import torch

from bough.base.plan import RowInit
from bough.worker.sampling.base import SampleContext, Tensor

FORBIDDEN = float("-inf")


class LogitBias:
    """Adds ``logit_bias``; a RowState. The values are finite and bounded, so a bias alone forbids nothing."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, row: int, init: RowInit) -> None:
        bias = init.params.logit_bias
        if bias:
            self.rows[row] = torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=torch.float32)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """The bias does not depend on what was sampled."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                ids, values = self.rows[row]
                logits[i, ids] += values.to(logits.device)


class AllowedTokens:
    """Forbids everything but ``allowed_token_ids``; a RowState."""

    def __init__(self) -> None:
        self.rows: dict[int, Tensor] = {}

    def add(self, row: int, init: RowInit) -> None:
        if init.params.allowed_token_ids:
            self.rows[row] = torch.tensor(init.params.allowed_token_ids)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """What is allowed does not depend on what was sampled."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                ids = self.rows[row]
                kept = logits[i, ids]
                logits[i] = FORBIDDEN
                logits[i, ids] = kept


class MinTokens:
    """Forbids the end-of-sequence and stop ids until ``min_tokens`` tokens were generated; a RowState."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, Tensor]] = {}

    def add(self, row: int, init: RowInit) -> None:
        ends = (*init.eos_ids, *init.params.stop_token_ids)
        if ends and init.params.min_tokens > 0:
            self.rows[row] = init.n_prompt + init.params.min_tokens, torch.tensor(ends)

    def remove(self, row: int) -> None:
        self.rows.pop(row, None)

    def accept(self, row: int, token: int) -> None:
        """The number of generated tokens follows from the position."""

    def apply(self, logits: Tensor, context: SampleContext) -> None:
        for i, row in enumerate(context.rows):
            if row in self.rows:
                until, ids = self.rows[row]
                if context.positions[i] < until:
                    logits[i, ids] = FORBIDDEN
