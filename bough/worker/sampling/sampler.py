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
from bough.device.platform.copies import Fetch, to_device
from bough.worker.sampling.bad_words import BadWords
from bough.worker.sampling.base import RowState, SampleContext, Tensor
from bough.worker.sampling.bias import AllowedTokens, LogitBias, MinTokens
from bough.worker.sampling.logprobs import Logprobs, Report
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


@dataclass(slots=True)
class Sampling:
    """A choice for S rows that the device makes, or has made.

    Attributes:
        tokens: [S] int64 on the device; negative for rows that fail.
        fetch: on its way to the host: [2, S], whether the raw logits are a distribution (not negative), and tokens; or
            [S], where nothing but the logits decides.
        reports: logprobs of rows that asked.
    """

    tokens: Tensor
    fetch: Fetch
    reports: list[Report]


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
        self._histories: list[RowState] = [Penalties(ops), BadWords()]
        self._features: list[RowState] = [*self._histories, LogitBias(), AllowedTokens(), MinTokens()]
        self._particular: set[int] = set()  # rows that want more than their likeliest id

    def add(self, row: int, init: RowInit) -> None:
        if init.params.temperature >= MIN_TEMPERATURE:
            self._draws[row] = _Draw.of(init.params, init.seed, self._vocab_size)
        self._logprobs.add(row, init)
        for feature in self._features:
            feature.add(row, init)
        if row in self._draws or row in self._logprobs.rows or any(row in feature.rows for feature in self._features):
            self._particular.add(row)

    def remove(self, row: int) -> None:
        self._particular.discard(row)
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

    def plain(self, rows: list[int]) -> bool:
        """Whether all of ``rows`` take their likeliest id, unless a mask forbids it, and nothing is reported of it."""
        return self._particular.isdisjoint(rows)

    def remembers(self, rows: list[int]) -> bool:
        """Whether what may be sampled for any of ``rows`` depends on what was sampled before."""
        return any(row in feature.rows for feature in self._histories if feature.rows for row in rows)

    def sample(self, logits: Tensor, context: SampleContext) -> Sampled:
        """Choose a token for each row of ``logits`` ([S, V], any float dtype; they stay as they are)."""
        return self.finish(self.launch(logits, context))

    def launch(self, logits: Tensor, context: SampleContext, best: Tensor | None = None) -> Sampling:
        """As :meth:`sample`, without waiting for the device. ``best``: the likeliest ids [S], where they are known."""
        rows, device = context.rows, logits.device
        if best is None:
            best = self._ops.argmax(logits)
        active = [feature for feature in self._features if feature.rows]
        ruled, masked = self._ruled(active, context)
        if not ruled and not masked and self._draws.keys().isdisjoint(rows):
            return self._launched(logits, rows, best, best)
        tokens = best.clone()
        if masked:
            self._choose(logits, tokens, masked, context)
        if ruled:
            at = to_device(np.array(ruled), device)
            changed = self._apply(active, logits[at].float(), ruled, context)
            tokens[at] = self._ops.argmax(changed).where(best[at] >= 0, -1)
            self._draw(changed, at, ruled, tokens, context)
        apart = set(ruled)
        self._draw(logits, None, [i for i in range(len(rows)) if i not in apart], tokens, context)
        return self._launched(logits, rows, tokens, torch.stack((best, tokens)))

    def finish(self, sampling: Sampling) -> Sampled:
        """Wait for what was launched."""
        chosen, *columns = sampling.fetch.arrays()
        best, tokens = chosen if chosen.ndim == 2 else (chosen, chosen)
        failed: dict[int, Failure] = {}
        for i in (tokens < 0).nonzero()[0].tolist():
            if best[i] < 0:
                failed[i] = Failure("the model's logits are not finite")
            else:
                failed[i] = Failure("the request's own rules leave no token to sample", 400)
        ids = tokens.tolist()
        return Sampled(ids, self._logprobs.finish(sampling.reports, columns, ids, failed), failed)

    def _launched(self, logits: Tensor, rows: list[int], tokens: Tensor, fetched: Tensor) -> Sampling:
        """``tokens`` on their way, as ``fetched`` (see :class:`Sampling`), and what is reported about them."""
        reports = self._logprobs.launch(logits, rows, tokens)
        found = [tensor for report in reports for tensor in report.tensors]
        return Sampling(tokens, Fetch(fetched, *found), reports)

    def _ruled(self, active: list[RowState], context: SampleContext) -> tuple[list[int], list[int]]:
        """The indices of rows whose logits a mask or one of the ``active`` features changes; and those of greedy rows
        with a mask and nothing else, for which no logits have to be written."""
        ruled = [i for i, row in enumerate(context.rows) if any(row in f.rows for f in active)] if active else []
        if context.masks is None:
            return ruled, []
        masked, others = context.masked.tolist(), set(ruled)
        plain = [i for i in masked if i not in others and context.rows[i] not in self._draws]
        return (ruled, plain) if len(plain) == len(masked) else (sorted({*ruled, *masked} - {*plain}), plain)

    def _choose(self, logits: Tensor, tokens: Tensor, masked: list[int], context: SampleContext) -> None:
        """Replace ``tokens``, the likeliest, at the indices ``masked`` by the likeliest that the masks there allow."""
        masks = context.masks
        assert masks is not None
        if len(masked) < len(context.masked):
            masks = masks[to_device(np.searchsorted(context.masked, masked).astype(np.int64), logits.device)]
        at = to_device(np.array(masked, np.int64), logits.device)
        self._ops.masked_argmax(logits, masks, at, tokens)

    def _apply(self, active: list[RowState], changed: Tensor, ruled: list[int], context: SampleContext) -> Tensor:
        """``changed``, the logits [N, V] float32 of the rows at the indices ``ruled``, after masks and features."""
        if context.masks is not None:
            mine = np.flatnonzero(np.isin(context.masked, ruled))
            masks = context.masks
            if len(mine) < len(context.masked):
                masks = masks[to_device(mine, changed.device)]
            lines = np.searchsorted(ruled, context.masked[mine])
            self._ops.apply_bitmask(changed, masks, to_device(lines.astype(np.int64), changed.device))
        part = SampleContext([context.rows[i] for i in ruled], context.positions[ruled])
        for feature in active:
            feature.apply(changed, part)
        return changed

    def _draw(
        self, logits: Tensor, at: Tensor | None, members: list[int], tokens: Tensor, context: SampleContext
    ) -> None:
        """Replace ``tokens`` at the indices ``members`` [N] of rows that are not greedy by draws.

        ``logits`` are those of the members alone, whose indices are ``at``, too; or of all rows, if that is None.
        """
        drawn = [(line, i) for line, i in enumerate(members) if context.rows[i] in self._draws]
        if not drawn:
            return
        where = [i for _, i in drawn]
        if len(drawn) == len(logits):
            part, place = logits, slice(None) if at is None else at
        else:
            place = to_device(np.array(where), logits.device)
            part = logits[place if at is None else to_device(np.array([line for line, _ in drawn]), logits.device)]
        rows = [self._draws[context.rows[i]] for i in where]
        draws = Draws(
            best=tokens[place].contiguous(),
            temperature=np.array([d.temperature for d in rows], np.float32),
            top_k=np.array([d.top_k for d in rows], np.int64),
            top_p=np.array([d.top_p for d in rows], np.float64),
            least_z=np.array([d.least_z for d in rows], np.float64),
            seeds=np.array([d.seed for d in rows], np.uint64),
            positions=context.positions[where],
        )
        tokens[place] = self._ops.sample(part, draws)
