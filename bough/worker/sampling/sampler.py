"""The sampler: logits of the rows that sample -> one token each.

Greedy rows take the largest logit, ties by the lowest id. Other rows invert the cumulative distribution, in
the order of the vocabulary, at one uniform number that depends on (seed, position) alone. No row's token
depends on which other rows are in the batch. Order of the steps: masks of constraints; penalties, bias, bad words,
allowed tokens, min_tokens; temperature; top-k, top-p, min-p; draw.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from bough.base.plan import Failure, PositionLogprobs, RowInit
from bough.device.ops.registry import Ops
from bough.worker.sampling.bad_words import BadWords
from bough.worker.sampling.base import RowState, SampleContext, Tensor
from bough.worker.sampling.bias import AllowedTokens, LogitBias, MinTokens
from bough.worker.sampling.draw import draw, uniforms
from bough.worker.sampling.filters import Filters, filter_weights
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


@dataclass(frozen=True, slots=True)
class _Draws:
    """A row that is not greedy."""

    temperature: float
    seed: int
    filters: Filters | None


class Sampler:
    """Owns the sampling state of all rows.

    ``add`` and ``remove`` follow the plans; ``sample`` chooses without changing any state, so that it can be
    repeated; ``accept`` makes a choice part of the rows' histories.
    """

    def __init__(self, vocab_size: int, ops: Ops) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._draws: dict[int, _Draws] = {}
        self._logprobs = Logprobs()
        self._features: list[RowState] = [Penalties(), LogitBias(), BadWords(), AllowedTokens(), MinTokens()]

    def add(self, row: int, init: RowInit) -> None:
        p = init.params
        if p.temperature >= MIN_TEMPERATURE:
            self._draws[row] = _Draws(p.temperature, init.seed, Filters.of(p, self._vocab_size))
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
        return self._logprobs.report(row, logits, tokens)

    def sample(self, logits: Tensor, context: SampleContext) -> Sampled:
        """Choose a token for each row of ``logits`` ([S, V], any float dtype; changed in place where float32)."""
        raw = self._logprobs.capture(logits, context.rows)
        tokens: list[int] = self._ops.argmax(logits).tolist()
        failed = {i: Failure("the model's logits are not finite") for i, token in enumerate(tokens) if token < 0}
        active = [f for f in self._features if any(row in f.rows for row in context.rows)]
        if active or context.masks is not None:
            logits = logits.float()
            if context.masks is not None:
                self._ops.apply_bitmask(logits, context.masks, torch.from_numpy(context.masked).to(logits.device))
            for feature in active:
                feature.apply(logits, context)
            tokens = self._ops.argmax(logits).tolist()
            for i, token in enumerate(tokens):
                if token < 0:
                    failed.setdefault(i, Failure("the request's own rules leave no token to sample", 400))
        drawn = [i for i, row in enumerate(context.rows) if row in self._draws and i not in failed]
        if drawn:
            best = [tokens[i] for i in drawn]
            for i, token in zip(drawn, self._draw(logits.float(), best, drawn, context)):
                tokens[i] = token
        reports = {
            i: self._logprobs.report(context.rows[i], values, [tokens[i]])
            for i, values in raw.items()
            if i not in failed
        }
        return Sampled(tokens, reports, failed)

    def _draw(self, logits: Tensor, best: list[int], drawn: list[int], context: SampleContext) -> list[int]:
        """Tokens for the rows at the indices ``drawn``; ``best`` is the likeliest token of each of them."""
        draws = [self._draws[context.rows[i]] for i in drawn]
        if len(drawn) < len(context.rows):
            logits = logits[drawn]
        largest = logits.gather(1, torch.tensor(best, device=logits.device)[:, None])
        scale = torch.tensor([[d.temperature] for d in draws], dtype=torch.float32, device=logits.device)
        weights = ((logits - largest) / scale).exp_()
        filtered = [(at, d.filters) for at, d in enumerate(draws) if d.filters is not None]
        if filtered:
            at = [i for i, _ in filtered]
            part = weights[at]
            filter_weights(part, [f for _, f in filtered])
            weights[at] = part
        seeds = np.array([d.seed & UINT64 for d in draws], np.uint64)
        u = torch.from_numpy(uniforms(seeds, context.positions[drawn])).to(logits.device)
        tokens: list[int] = draw(weights, u).tolist()
        return tokens
