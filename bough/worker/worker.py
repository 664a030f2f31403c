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

from bough.base.plan import Failure, PositionLogprobs, RowInit, StepPlan, StepResult
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch
from bough.worker.model_runner import ModelRunner
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
    """

    def __init__(self, runner: ModelRunner, rows: DeviceRows, sampler: Sampler) -> None:
        self._runner = runner
        self._rows = rows
        self._sampler = sampler
        self._prompt_logprobs = PromptLogprobs()
        self._broken: dict[int, Failure] = {}

    def forward(self, plan: StepPlan) -> ForwardHandle:
        """Update the row state and compute the plan's tokens."""
        began = time.perf_counter()
        with torch.inference_mode():
            for row in plan.released.tolist():
                self._remove(row)
            for init in plan.admitted:
                self._add(init)
            batch = ForwardBatch.from_plan(plan, self._rows)
            hidden = self._runner.forward(batch)
        return ForwardHandle(plan, batch, hidden, time.perf_counter() - began)

    def sample(self, handle: ForwardHandle) -> StepResult:
        """Sample what the plan asks for; called once per handle, before the next plan's forward."""
        began = time.perf_counter()
        plan, batch = handle.plan, handle.batch
        result = StepResult(plan.step, np.zeros(0, np.int32), np.zeros(len(plan.rows), np.int32))
        rows = plan.rows.tolist()
        result.failed.update({i: self._broken[row] for i, row in enumerate(rows) if row in self._broken})
        with torch.inference_mode():
            self._report_prompts(handle, result)
            if len(batch.sampled):
                self._sample(handle, result)
        result.seconds = handle.seconds + time.perf_counter() - began
        return result

    def _add(self, init: RowInit) -> None:
        # A step that failed as a whole may have kept a release from us.
        self._remove(init.row)
        self._rows.add(init)
        try:
            self._sampler.add(init.row, init)
            self._prompt_logprobs.add(init.row, init)
        except Exception as error:
            self._sampler.remove(init.row)
            self._broken[init.row] = _reason(error)

    def _remove(self, row: int) -> None:
        self._sampler.remove(row)
        self._prompt_logprobs.remove(row)
        self._broken.pop(row, None)

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

    def _sample(self, handle: ForwardHandle, result: StepResult) -> None:
        plan, batch = handle.plan, handle.batch
        hidden = handle.hidden[batch.sample_at]
        rows = plan.rows[batch.sampled].tolist()
        context = SampleContext(rows, (plan.start + plan.n_new)[batch.sampled].astype(np.int64))
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
                    result.logprobs[i] = sampled.logprobs[at]
        result.tokens = np.array([token for _, _, token in done], np.int32)
        result.counts[[i for i, _, _ in done]] = 1
        for _, row, token in done:
            self._sampler.accept(row, token)
        self._rows.set_last([row for _, row, _ in done], result.tokens)

    def _one_by_one(self, hidden: Tensor, context: SampleContext) -> Sampled:
        tokens: list[int] = []
        logprobs: dict[int, list[PositionLogprobs]] = {}
        failed: dict[int, Failure] = {}
        for i, row in enumerate(context.rows):
            try:
                alone = SampleContext([row], context.positions[i : i + 1])
                sampled = self._sampler.sample(self._runner.logits(hidden[i : i + 1]), alone)
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
