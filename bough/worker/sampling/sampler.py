"""The sampler: logits of the rows that sample -> one token each.

Greedy rows take the largest logit, ties by the lowest id. Other rows invert the cumulative distribution, in
the order of the vocabulary, at one uniform number that depends on (seed, position) alone. No row's token
depends on which other rows are in the batch. Order of the steps: masks of constraints; penalties, bias, bad words,
allowed tokens, min_tokens; temperature; top-k, top-p, min-p; draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from bough.base.params import SamplingParams
from bough.base.plan import Failure, PositionLogprobs, RowInit
from bough.device.ops.registry import Ops
from bough.device.ops.sampling import Draws
from bough.worker.sampling.bad_words import BadWords
from bough.worker.sampling.base import RowState, SampleContext, Tensor
from bough.worker.sampling.bias import AllowedTokens, LogitBias, MinTokens
from bough.worker.sampling.logprobs import Logprobs
from bough.worker.sampling.penalties import Penalties

UINT64 = (1 << 64) - 1

MIN_TEMPERATURE = 1e-5
"""Below it a row is greedy: the quotient of logits and temperature would leave float32."""


@dataclass(slots=True)
class Sampled:
    """What was chosen for S rows.

    Attributes:
        tokens: [S] ids; meaningless for failed rows.
        logprobs: index -> report, for rows that asked.
        failed: index -> reason.
    """

    tokens: list[int]
    logprobs: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    failed: dict[int, Failure] = field(default_factory=dict)


class _Draw(NamedTuple):
    """A row that is not greedy: its columns of :class:`bough.device.ops.sampling.Draws`."""

    temperature: float
    top_k: int
    top_p: float
    least_z: float
    seed: int

    @classmethod
    def of(cls, params: SamplingParams, seed: int, vocab_size: int) -> _Draw:
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        least_z = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        return cls(params.temperature, top_k, min(params.top_p, 1.0), least_z, seed & UINT64)


class Sampler:
    """Owns the sampling state of all rows.

    ``add`` and ``remove`` follow the plans; ``sample`` chooses without changing any state, so that it can be
    repeated; ``accept`` makes a choice part of the rows' histories.
    """

    def __init__(self, vocab_size: int, ops: Ops) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._draws: dict[int, _Draw] = {}
        self._logprobs = Logprobs(ops)
        self._features: list[RowState] = [Penalties(), LogitBias(), BadWords(), AllowedTokens(), MinTokens()]

    def add(self, row: int, init: RowInit) -> None:
        if init.params.temperature >= MIN_TEMPERATURE:
            self._draws[row] = _Draw.of(init.params, init.seed, self._vocab_size)
        self._logprobs.add(row, init)
        for feature in self._features:
            feature.add(row, init)

    def remove(self, row: int) -> None:
        self._draws.pop(row, None)
        self._logprobs.remove(row)
        for feature in self._features:
            feature.remove(row)

    def accept(self, row: int, token: int) -> None:
        for feature in self._features:
            feature.accept(row, token)

    def report(self, row: int, logits: Tensor, tokens: list[int]) -> list[PositionLogprobs]:
        """Logprobs of ``tokens`` [N], which ``row`` was given without sampling, from their raw ``logits`` [N, V]."""
        return self._logprobs.of(row, logits, tokens)

    def sample(self, logits: Tensor, context: SampleContext) -> Sampled:
        """Choose a token for each row of ``logits`` ([S, V], any float dtype; they stay as they are)."""
        rows = context.rows
        best: list[int] = self._ops.argmax(logits).tolist()
        failed = {i: Failure("the model's logits are not finite") for i, token in enumerate(best) if token < 0}
        active = [feature for feature in self._features if feature.rows]
        ruled = self._ruled(active, context)
        groups = [(logits, list(range(len(rows))))]
        if ruled:
            plain = [i for i in range(len(rows)) if i not in ruled]
            groups = [(logits[plain], plain), (self._apply(active, logits, ruled, context, best), ruled)]
        for i in ruled:
            if best[i] < 0:
                failed.setdefault(i, Failure("the request's own rules leave no token to sample", 400))
        tokens = list(best)
        for part, members in groups:
            lines = [line for line, i in enumerate(members) if rows[i] in self._draws and i not in failed]
            if lines:
                drawn = [members[line] for line in lines]
                chosen = self._draw(part if len(lines) == len(members) else part[lines], drawn, best, context)
                for i, token in zip(drawn, chosen):
                    tokens[i] = token
        reports = self._logprobs.report(logits, rows, tokens, failed)
        return Sampled(tokens, reports, failed)

    def _ruled(self, active: list[RowState], context: SampleContext) -> list[int]:
        """The indices of rows whose logits a mask or one of the ``active`` features changes."""
        if context.masks is None and not active:
            return []
        masked = set() if context.masks is None else set(context.masked.tolist())
        return [i for i, row in enumerate(context.rows) if i in masked or any(row in f.rows for f in active)]

    def _apply(
        self, active: list[RowState], logits: Tensor, ruled: list[int], context: SampleContext, best: list[int]
    ) -> Tensor:
        """The logits of the rows at the indices ``ruled`` after masks and features, float32; updates their ``best``."""
        changed = logits[ruled].float()
        if context.masks is not None:
            lines = torch.tensor([ruled.index(i) for i in context.masked.tolist()], device=logits.device)
            self._ops.apply_bitmask(changed, context.masks, lines)
        part = SampleContext([context.rows[i] for i in ruled], context.positions[ruled])
        for feature in active:
            feature.apply(changed, part)
        for i, token in zip(ruled, self._ops.argmax(changed).tolist()):
            best[i] = token
        return changed

    def _draw(self, logits: Tensor, members: list[int], best: list[int], context: SampleContext) -> list[int]:
        """Tokens for ``logits`` [N, V] of the rows at the N indices ``members``."""
        rows = [self._draws[context.rows[i]] for i in members]
        draws = Draws(
            best=np.array([best[i] for i in members], np.int64),
            temperature=np.array([d.temperature for d in rows], np.float32),
            top_k=np.array([d.top_k for d in rows], np.int64),
            top_p=np.array([d.top_p for d in rows], np.float64),
            least_z=np.array([d.least_z for d in rows], np.float64),
            seeds=np.array([d.seed for d in rows], np.uint64),
            positions=context.positions[members],
        )
        tokens: list[int] = self._ops.sample(logits, draws).tolist()
        return tokens
