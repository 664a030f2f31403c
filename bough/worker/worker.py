"""One rank: a StepPlan in, a StepResult out, in the order of the plans.

A step has three parts. ``forward`` and ``launch`` ask the device for work and do not wait for it; ``finish`` waits. An
executor calls them inline, where the device computes by itself, or from a thread of its own. With overlap, plan n + 1
may be written, and launched, before the result of plan n is known: the tokens that the host does not know come from the
device's own rows, and a row that turns out to have ended is simply computed once more.

What a row's sampling depends on besides its logits (penalties, bad words) is kept on the host. Where a step has such
rows, the one before it is finished before it is sampled: behind its forward, which keeps the device busy meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import LAST, Failure, Masks, PositionLogprobs, RowInit, StepPlan, StepResult
from bough.device.lora.pool import AdapterPool
from bough.device.ops.decode import Decoded
from bough.device.platform.copies import Timer, to_device
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch
from bough.worker.model_runner import ModelRunner
from bough.worker.pooling import Pooler
from bough.worker.sampling.base import SampleContext
from bough.worker.sampling.logprobs import PromptLogprobs
from bough.worker.sampling.sampler import Sampled, Sampler, Sampling

Tensor = torch.Tensor


@dataclass(slots=True)
class ForwardHandle:
    """A forward that was computed and waits for its sampling.

    Attributes:
        plan: the plan.
        batch: its device tensors.
        hidden: [T, D] last hidden states; only those that are sampled from, where nobody wants others.
        decoded: logits and likeliest ids as well, where all T tokens are sampled from and it was done in one go.
        timer: of the forward.
    """

    plan: StepPlan
    batch: ForwardBatch
    hidden: Tensor
    decoded: Decoded | None
    timer: Timer


@dataclass(slots=True)
class Launched:
    """A step whose sampling was launched.

    Attributes:
        plan, sampled: the plan, and the plan indices of the rows that sample.
        timers: of what came before (None: nothing), of the forward and of the sampling, which may be the same.
        result: what is known so far; complete once it is ``finished``.
        sampling: the tokens on their way, or here already.
        removed: rows that were given to others since.
    """

    plan: StepPlan
    sampled: NDArray[np.intp]
    timers: tuple[Timer | None, Timer, Timer]
    result: StepResult
    sampling: Sampling | Sampled | None = None
    removed: set[int] = field(default_factory=set)
    finished: bool = False


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
        self._unfinished: list[Launched] = []
        self._before: Timer | None = None
        self._known = np.zeros(rows.n_rows, np.int32)
        """[n_rows] ids of each row that the sampler knows of, or will once what is launched is finished."""

    def forward(self, plan: StepPlan) -> ForwardHandle:
        """Update the row state and compute the plan's tokens."""
        timer = self._rows.timer()
        for row in plan.released.tolist():
            self._remove(row)
        if plan.admitted:
            with torch.inference_mode():
                for init in plan.admitted:
                    self._add(init)
        self._take_forced(plan)
        batch, hidden, decoded = self._runner.forward(plan, self._rows, timer, self._wants_whole(plan))
        timer.stop()
        return ForwardHandle(plan, batch, hidden, decoded, timer)

    def sample(self, handle: ForwardHandle, masks: Masks | None = None) -> StepResult:
        """Sample what the plan asks for, under ``masks``, and wait for it."""
        return self.finish(self.launch(handle, masks))

    def launch(self, handle: ForwardHandle, masks: Masks | None = None) -> Launched:
        """Have sampled what the plan asks for, under ``masks``; once per handle, before the next plan's forward."""
        if handle.decoded is not None and masks is None:
            launched = self._decided(handle, handle.decoded)
            if launched is not None:
                return launched
        timer = self._rows.timer()
        plan, batch = handle.plan, handle.batch
        result = StepResult(plan.step, np.zeros(0, np.int32), np.zeros(len(plan.rows), np.int32))
        if self._broken:
            rows = plan.rows.tolist()
            result.failed.update({i: self._broken[row] for i, row in enumerate(rows) if row in self._broken})
        with torch.inference_mode():
            if self._prompt_logprobs.rows:
                self._report_prompts(handle, result)
            self._report_forced(handle, result)
            if self._pooler.rows:
                self._pool(handle, result)
            launched = Launched(plan, batch.sampled, (self._before, handle.timer, timer), result)
            if len(batch.sampled):
                fresh = not (result.logprobs or result.prompt_logprobs or result.pooled)
                launched.sampling = self._sample(handle, masks, timer if fresh else None)
        timer.stop()
        self._before = timer
        self._unfinished.append(launched)
        return launched

    def _decided(self, handle: ForwardHandle, decoded: Decoded) -> Launched | None:
        """A step that is over with its forward, as all rows take their likeliest ids and report nothing; else None.

        What the rest of :meth:`launch` and :meth:`finish` come to then, in a few lines: behind kernels that have
        emptied the caches each of them counts several times.
        """
        plan = handle.plan
        if not decoded.sure or self._broken or self._unfinished or plan.forced:
            return None
        if self._prompt_logprobs.rows or self._pooler.rows or not self._sampler.plain(plan.rows.tolist()):
            return None
        timer, before = handle.timer, self._before
        result = StepResult(plan.step, decoded.ids.copy(), plan.n_new, seconds=timer.seconds())
        result.idle = 0.0 if before is None else timer.since(before)
        self._before = timer
        return Launched(plan, handle.batch.sampled, (before, timer, timer), result, finished=True)

    def finish(self, launched: Launched) -> StepResult:
        """Wait for the step; all that was launched before it is finished, too."""
        while not launched.finished:
            self._finish(self._unfinished.pop(0))
        return launched.result

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
        for launched in self._unfinished:
            launched.removed.add(row)
        self._sampler.remove(row)
        self._prompt_logprobs.remove(row)
        self._pooler.remove(row)
        self._broken.pop(row, None)

    def _wants_whole(self, plan: StepPlan) -> bool:
        """Whether hidden states are wanted that nobody samples from."""
        if plan.forced or self._pooler.rows:
            return True
        if not self._prompt_logprobs.rows:
            return False
        covers, steps = self._prompt_logprobs.covers, zip(plan.rows.tolist(), plan.start.tolist(), plan.n_new.tolist())
        return any(covers(*step) for step in steps)

    def _take_forced(self, plan: StepPlan) -> None:
        """Make the tokens that the plan brings and nobody sampled part of their rows' histories."""
        at = plan.rows.astype(np.intp)
        ends, known = plan.start + plan.n_new, self._known[at]
        news = ends > known
        if True in news.tolist():
            self._settle()
            q_end = np.cumsum(plan.n_new)
            for i in np.flatnonzero(news).tolist():
                for token in plan.tokens[q_end[i] - (ends[i] - known[i]) : q_end[i]].tolist():
                    if token != LAST:  # the row's sampling failed, and the host does not know yet
                        self._sampler.accept(int(plan.rows[i]), token)
            known = np.maximum(known, ends)
        self._known[at] = known + plan.sample

    def _report_forced(self, handle: ForwardHandle, result: StepResult) -> None:
        plan, q_start = handle.plan, handle.batch.host_q_start
        for i, (position, ids) in plan.forced.items():
            if i in result.failed:
                continue
            first = q_start[i] + position - 1 - plan.start[i]
            logits = self._runner.logits(handle.hidden[first : first + len(ids)], handle.batch.adapters[i])
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
            logits = partial(self._runner.logits, places=handle.batch.adapters[i])
            try:
                result.prompt_logprobs[i] = self._prompt_logprobs.report(row, start, hidden, logits)
            except Exception as error:
                result.failed[i] = _reason(error)

    def _sample(self, handle: ForwardHandle, masks: Masks | None, timer: Timer | None) -> Sampling | Sampled:
        """``timer`` is started where the host's preparations end; None: the device has begun before."""
        plan, batch = handle.plan, handle.batch
        hidden, sampled, ends = handle.hidden, plan.rows, plan.start + plan.n_new
        if len(batch.sampled) < len(plan.tokens):  # a step of decodes samples from every token
            hidden = hidden.index_select(0, batch.sample_at)
            sampled, ends = sampled[batch.sampled], ends[batch.sampled]
        rows = sampled.tolist()
        if self._sampler.remembers(rows):
            self._settle()
        if timer is not None:
            timer.start()
        context = SampleContext(rows, ends.astype(np.int64))
        if masks is not None:
            context.masked = np.searchsorted(batch.sampled, masks.rows).astype(np.int64)
            context.masks = to_device(masks.bits, hidden.device)
        places = batch.adapters[batch.sampled]
        decoded = handle.decoded
        logits = self._runner.logits(hidden, places) if decoded is None else decoded.logits
        sampling: Sampling | Sampled
        try:
            sampling = self._sampler.launch(logits, context, None if decoded is None else decoded.best)
            tokens = sampling.tokens
        except Exception:
            # One row's rules broke the common path. Sampling changes no state, so each row gets its own try.
            sampling = self._one_by_one(hidden, places, context)
            tokens = to_device(np.array(sampling.tokens, np.int64), hidden.device)
        self._rows.set_last(batch.sample_rows, tokens)
        return sampling

    def _settle(self) -> None:
        while self._unfinished:
            self._finish(self._unfinished.pop(0))

    def _finish(self, launched: Launched) -> None:
        result, plan = launched.result, launched.plan
        launched.finished = True
        if launched.sampling is not None:
            sampled = launched.sampling
            if isinstance(sampled, Sampling):
                sampled = self._sampler.finish(sampled)
            done: list[int] = []
            tokens: list[int] = []
            for at, (i, token) in enumerate(zip(launched.sampled.tolist(), sampled.tokens)):
                if at in sampled.failed:
                    result.failed.setdefault(i, sampled.failed[at])
                elif i not in result.failed:
                    done.append(i)
                    tokens.append(token)
                    if at in sampled.logprobs:
                        result.logprobs[i] = result.logprobs.get(i, []) + sampled.logprobs[at]
            result.tokens = np.array(tokens, np.int32)
            result.counts[done] = 1
            rows = plan.rows[done].tolist()
            if self._sampler.remembers(rows):
                for row, token in zip(rows, tokens):
                    if row not in launched.removed:
                        self._sampler.accept(row, token)
        before, forward, sampling = launched.timers
        result.seconds = forward.seconds() + sampling.seconds()
        result.idle = sampling.since(forward) + (0.0 if before is None else forward.since(before))

    def _one_by_one(self, hidden: Tensor, places: NDArray[np.int32], context: SampleContext) -> Sampled:
        tokens: list[int] = []
        logprobs: dict[int, list[PositionLogprobs]] = {}
        failed: dict[int, Failure] = {}
        for i in range(len(context.rows)):
            try:
                sampled = self._sampler.sample(self._runner.logits(hidden[i : i + 1], places[i]), context.alone(i))
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
