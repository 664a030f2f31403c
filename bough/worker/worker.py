"""One rank: a StepPlan in, a StepResult out, synchronously and in the order of the plans.

An executor calls it inline, or from a thread of its own so that the host's work overlaps with it. With
overlap, plan n + 1 may be written before the result of plan n is known: the tokens that the host does not know
come from the device's own rows, and a row that turns out to have ended is simply computed once more.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from bough.base.plan import LAST, Failure, Masks, PositionLogprobs, RowInit, StepPlan, StepResult
from bough.device.lora.pool import AdapterPool
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch
from bough.worker.model_runner import ModelRunner
from bough.worker.pooling import Pooler
from bough.worker.sampling.base import SampleContext
from bough.worker.sampling.logprobs import PromptLogprobs
from bough.worker.sampling.sampler import Sampled, Sampler

Tensor = torch.Tensor


@dataclass(slots=True)
class ForwardHandle:
    """A forward that was computed and waits for its sampling.

    Attributes:
        plan: the plan.
        batch: its device tensors.
        hidden: [T, D] last hidden states.
        seconds: device time so far.
    """

    plan: StepPlan
    batch: ForwardBatch
    hidden: Tensor
    seconds: float


class Worker:
    """Follows plans: row state, forward, sampling.

    Whatever goes wrong for one row alone (its sampling parameters, its logits) ends up in ``StepResult.failed`` and
    leaves the others alone; an exception of the shared forward is raised.

    Attributes:
        adapters: those that rows may have; None where the model takes none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        rows: DeviceRows,
        sampler: Sampler,
        prompt_logprobs: PromptLogprobs,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.adapters = adapters
        self._runner = runner
        self._rows = rows
        self._sampler = sampler
        self._prompt_logprobs = prompt_logprobs
        self._pooler = Pooler()
        self._broken: dict[int, Failure] = {}
        self._known = np.zeros(len(rows.last_token), np.int32)
        """[n_rows] ids of each row that the sampler knows of."""

    def forward(self, plan: StepPlan) -> ForwardHandle:
        """Update the row state and compute the plan's tokens."""
        began = time.perf_counter()
        with torch.inference_mode():
            for row in plan.released.tolist():
                self._remove(row)
            for init in plan.admitted:
                self._add(init)
            self._take_forced(plan)
            batch = ForwardBatch.from_plan(plan, self._rows)
            hidden = self._runner.forward(batch)
        return ForwardHandle(plan, batch, hidden, time.perf_counter() - began)

    def sample(self, handle: ForwardHandle, masks: Masks | None = None) -> StepResult:
        """Sample what the plan asks for, under ``masks``; called once per handle, before the next plan's forward."""
        began = time.perf_counter()
        plan, batch = handle.plan, handle.batch
        result = StepResult(plan.step, np.zeros(0, np.int32), np.zeros(len(plan.rows), np.int32))
        rows = plan.rows.tolist()
        result.failed.update({i: self._broken[row] for i, row in enumerate(rows) if row in self._broken})
        with torch.inference_mode():
            self._report_prompts(handle, result)
            self._report_forced(handle, result)
            if self._pooler.rows:
                self._pool(handle, result)
            if len(batch.sampled):
                self._sample(handle, result, masks)
        result.seconds = handle.seconds + time.perf_counter() - began
        return result

    def _add(self, init: RowInit) -> None:
        # A step that failed as a whole may have kept a release from us.
        self._remove(init.row)
        self._rows.add(init)
        self._known[init.row] = len(init.ids)
        try:
            self._sampler.add(init.row, init)
            self._prompt_logprobs.add(init.row, init)
            self._pooler.add(init.row, init)
        except Exception as error:
            self._sampler.remove(init.row)
            self._broken[init.row] = _reason(error)

    def _remove(self, row: int) -> None:
        self._sampler.remove(row)
        self._prompt_logprobs.remove(row)
        self._pooler.remove(row)
        self._broken.pop(row, None)

    def _take_forced(self, plan: StepPlan) -> None:
        """Make the tokens that the plan brings and nobody sampled part of their rows' histories."""
        ends = plan.start + plan.n_new
        news = np.flatnonzero(ends > self._known[plan.rows])
        if not len(news):
            return
        q_end = np.cumsum(plan.n_new)
        for i in news.tolist():
            row = int(plan.rows[i])
            for token in plan.tokens[q_end[i] - (ends[i] - self._known[row]) : q_end[i]].tolist():
                if token != LAST:  # the row's sampling failed, and the host does not know yet
                    self._sampler.accept(row, token)
            self._known[row] = ends[i]

    def _report_forced(self, handle: ForwardHandle, result: StepResult) -> None:
        plan, q_start = handle.plan, handle.batch.host_q_start
        for i, (position, ids) in plan.forced.items():
            if i in result.failed:
                continue
            first = q_start[i] + position - 1 - plan.start[i]
            logits = self._runner.logits(handle.hidden[first : first + len(ids)])
            try:
                result.logprobs[i] = self._sampler.report(int(plan.rows[i]), logits, ids.tolist())
            except Exception as error:
                result.failed[i] = _reason(error)

    def _pool(self, handle: ForwardHandle, result: StepResult) -> None:
        plan, q_start = handle.plan, handle.batch.host_q_start
        for i, (row, start) in enumerate(zip(plan.rows.tolist(), plan.start.tolist())):
            if i in result.failed or row not in self._pooler.rows:
                continue
            hidden = handle.hidden[q_start[i] : q_start[i + 1]]
            try:
                pooled = self._pooler.take(row, start, hidden, self._runner.scores)
            except Exception as error:
                result.failed[i] = Failure(f"pooling failed: {error}")
                continue
            if pooled is not None:
                result.pooled[i] = pooled

    def _report_prompts(self, handle: ForwardHandle, result: StepResult) -> None:
        plan, q_start = handle.plan, handle.batch.host_q_start
        for i, (row, start, n_new) in enumerate(zip(plan.rows.tolist(), plan.start.tolist(), plan.n_new.tolist())):
            if i in result.failed or not self._prompt_logprobs.covers(row, start, n_new):
                continue
            hidden = handle.hidden[q_start[i] : q_start[i + 1]]
            try:
                result.prompt_logprobs[i] = self._prompt_logprobs.report(row, start, hidden, self._runner.logits)
            except Exception as error:
                result.failed[i] = _reason(error)

    def _sample(self, handle: ForwardHandle, result: StepResult, masks: Masks | None) -> None:
        plan, batch = handle.plan, handle.batch
        # A step of decodes samples from every token.
        everywhere = len(batch.sampled) == len(handle.hidden)
        hidden = handle.hidden if everywhere else handle.hidden[batch.sample_at]
        rows = plan.rows[batch.sampled].tolist()
        context = SampleContext(rows, (plan.start + plan.n_new)[batch.sampled].astype(np.int64))
        if masks is not None:
            context.masked = np.searchsorted(batch.sampled, masks.rows).astype(np.int64)
            context.masks = torch.from_numpy(masks.bits).to(hidden.device)
        logits = self._runner.logits(hidden)
        try:
            sampled = self._sampler.sample(logits, context)
        except Exception:
            # One row's rules broke the common path. Sampling changes no state, so each row gets its own try.
            sampled = self._one_by_one(hidden, context)
        done: list[tuple[int, int, int]] = []
        for at, (i, row, token) in enumerate(zip(batch.sampled.tolist(), rows, sampled.tokens)):
            if at in sampled.failed:
                result.failed.setdefault(i, sampled.failed[at])
            elif i not in result.failed:
                done.append((i, row, token))
                if at in sampled.logprobs:
                    result.logprobs[i] = result.logprobs.get(i, []) + sampled.logprobs[at]
        result.tokens = np.array([token for _, _, token in done], np.int32)
        result.counts[[i for i, _, _ in done]] = 1
        for _, row, token in done:
            self._sampler.accept(row, token)
            self._known[row] += 1
        self._rows.set_last([row for _, row, _ in done], result.tokens)

    def _one_by_one(self, hidden: Tensor, context: SampleContext) -> Sampled:
        tokens: list[int] = []
        logprobs: dict[int, list[PositionLogprobs]] = {}
        failed: dict[int, Failure] = {}
        for i in range(len(context.rows)):
            try:
                sampled = self._sampler.sample(self._runner.logits(hidden[i : i + 1]), context.alone(i))
            except Exception as error:
                sampled = Sampled([0], failed={0: _reason(error)})
            tokens += sampled.tokens
            if 0 in sampled.failed:
                failed[i] = sampled.failed[0]
            elif 0 in sampled.logprobs:
                logprobs[i] = sampled.logprobs[0]
        return Sampled(tokens, logprobs, failed)


def _reason(error: Exception) -> Failure:
    return Failure(f"sampling failed: {type(error).__name__}")
