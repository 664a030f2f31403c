"""The planner: turns what runs and what waits into the next StepPlan, under a token budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bough.base.plan import LAST, Bools, Index, Ints, RowInit, StepPlan
from bough.kv.manager import Admission, KVManager
from bough.kv.node import NOBODY
from bough.scheduler.background import BESIDE, Background
from bough.scheduler.parts import Parts, column, joined
from bough.scheduler.programs import Programs
from bough.scheduler.queue import WaitQueue
from bough.scheduler.req import EMPTY, NO_ROW, Req, Status, end_ids
from bough.scheduler.rows import Rows

MAX_RETRACTIONS = 3
"""A request that lost its row this often keeps the next one, so that everybody gets through."""

CROWDED = 3
"""Beside rows that generate no further prompt enters once those that enter, and end, have one in so many tokens of the
step: who generates goes on sooner, and the prompts that are in have their first tokens sooner. One enters in any step,
so nobody waits longer than for those before it."""

HEADROOM_START, HEADROOM_FLOOR, HEADROOM_DECAY, HEADROOM_RAISE = 0.4, 0.05, 0.995, 0.2
"""Share of the tokens that running requests may still generate for which an admission leaves room.
Most requests end early, so it decays while all goes well and rises when a retraction shows it was too low."""


@dataclass(slots=True)
class Flight:
    """A plan that was handed to the device, with its rows once more and their requests, in plan order."""

    plan: StepPlan
    rows: Index
    reqs: list[Req]


class OutOfCells(Exception):
    """A running row needs KV cells that are not to be had; somebody has to give some back."""


class Planner:
    """Plans one step at a time. There are no phases: every row catches up with its known tokens."""

    def __init__(
        self,
        kv: KVManager,
        rows: Rows,
        queue: WaitQueue,
        programs: Programs,
        background: Background,
        step_tokens: int,
        mixed_tokens: int,
        eos_ids: tuple[int, ...],
        clock: Callable[[], float],
        *,
        whole: bool = False,
    ) -> None:
        """``mixed_tokens``: of a step in which rows generate, for each prompt that is to be computed. ``whole``: a
        prompt is computed in one step or waits; a step must have room for the longest."""
        self._kv = kv
        self._whole = whole
        self._rows = rows
        self._queue = queue
        self._programs = programs
        self._background = background
        self._step_tokens = step_tokens
        self._mixed_tokens = mixed_tokens
        self._eos_ids = eos_ids
        self._clock = clock
        self._headroom = HEADROOM_START
        self._step = 0
        self._released: list[int] = []
        self._preempted: tuple[Req, Req] | None = None
        """Who makes room before the next step, and for whom."""
        self.suspects: deque[Req] = deque()
        """Requests of a forward that failed: each runs its next step alone, which shows who is to blame."""
        self.retracted = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0

    def next(self, settled: bool) -> Flight | None:
        """The next plan, or None when there is nothing to do or steps in flight must be committed first.

        Rows are taken away from requests only when ``settled``, that is when nothing is in flight: then the
        host knows every sampled token, and a retracted request resumes exactly where it was.
        """
        if self._background.stale():
            self.stop_background()
        if not settled and (self.suspects or self._preempted):
            return None
        if self.suspects:
            return self._next_suspect()
        if self._preempted:
            self._make_room(*self._preempted)
        while True:
            parts = Parts(self._step_tokens)
            try:
                budget = self._plan_running(parts, settled)
                break
            except OutOfCells:
                if self.stop_background():
                    continue
                if not settled:
                    return None
                self.retract(self._victim())
        budget = self._admit(parts, budget)
        self._run_background(parts, budget)
        self._headroom = max(HEADROOM_FLOOR, self._headroom * HEADROOM_DECAY)
        return self._finish(parts)

    def open(self) -> bool:
        """Whether others generate, there is a row, and nobody stands before whoever comes now."""
        rows, running = self._rows, self._rows.running
        running = running[rows.live[running] & ~rows.background[running]]
        generating = (rows.planned[running] >= rows.n_entered[running]).tolist()
        free = len(rows) < len(rows.live) and not (len(self._queue) or self.suspects)
        return free and bool(generating) and all(generating)

    def retract(self, row: int) -> None:
        """Take ``row`` away: its request waits again, and its KV stays in the tree as evictable."""
        rows, req = self._rows, self._rows.req(row)
        computed = int(rows.computed[row])
        self.vacate(row, computed)
        req.status = Status.WAITING
        req.retractions += 1
        self.retracted += 1
        self._headroom = min(1.0, self._headroom + HEADROOM_RAISE)
        self._queue.push(req)

    def close(self, req: Req) -> None:
        """``req``, which runs, is over; its row goes when no step in flight has it."""
        req.status = Status.FINISHED
        self._rows.live[req.row] = False
        self._background.stopped(req)

    def vacate(self, row: int, upto: int) -> None:
        """End the tenure of ``row``; the KV of its first ``upto`` tokens goes into the tree."""
        req = self._rows.req(row)
        named = req.request.program
        spent = named is not None and named.next_uses == 0 and req.status is Status.FINISHED
        self._kv.release(row, self._rows.ids[row, :upto], upto, spent=spent)
        self._programs.vacated(req)
        self._rows.leave(row)
        self._released.append(row)

    def discard(self, row: int, valid: int) -> None:
        """End the tenure of ``row`` after a failed forward; only its first ``valid`` tokens have KV."""
        self._kv.discard(row, valid)
        self._programs.vacated(self._rows.req(row))
        self._rows.leave(row)
        self._released.append(row)

    # -- rows that run ---------------------------------------------------------------------------------

    def _plan_running(self, parts: Parts, settled: bool) -> int:
        """Plan what the running rows still have to compute; returns the budget that is left."""
        rows = self._rows
        running = rows.running
        if not len(running):
            return parts.share(self._mixed_tokens, 0, len(self._queue))
        if settled and not rows.n_guided and self._background.running is None and len(running) <= self._step_tokens:
            # Then all of them are live and wait for nothing. In a step of decodes each lacks one token; behind kernels
            # that have emptied the caches every line counts.
            start = rows.planned[running]
            todo = rows.n_ids[running] - start
            if todo.tolist().count(1) == len(running):
                out_loc = self._kv.grow_rows(running)
                if out_loc is None:
                    raise OutOfCells
                parts.add(running, start, todo, rows.flat[rows.begin[running] + start], out_loc)
                return parts.share(self._mixed_tokens, len(running), len(self._queue))
        known = rows.n_ids[running] + rows.ahead[running]
        todo = known - rows.planned[running] - rows.held[running]
        # A row whose last allowed token is being sampled right now only waits for its commit.
        more = (
            rows.live[running]
            & ~rows.background[running]
            & (todo > 0)
            & ((rows.ahead[running] == 0) | (known < rows.limit[running]))
        )
        budget = self._step_tokens
        single, several = running[more & (todo == 1)][:budget], more & (todo > 1)
        if len(single):
            out_loc = self._kv.grow_rows(single)
            if out_loc is None:
                raise OutOfCells
            start = rows.planned[single]
            tokens = np.where(start < rows.n_ids[single], rows.ids[single, start], np.int32(LAST))
            parts.add(single, start, np.ones_like(start), tokens, out_loc)
        generated = len(single)
        answers = rows.planned[running] >= rows.n_entered[running]
        prompts = running[several & ~answers].tolist()
        # Tokens that grammars force leave half of the step to a prompt that has begun.
        room = budget // 2 if prompts else budget
        for row in running[several & answers].tolist():
            n = min(self._left(row), room - generated)
            if n > 0:
                self._extend(parts, row, n)
                generated += n
        budget = parts.share(self._mixed_tokens, generated, len(prompts) + len(self._queue))
        extended: list[tuple[int, int]] = []
        for row in prompts:
            if budget == 0:
                break
            left = self._left(row)
            if parts.cut and left > budget:
                continue
            n = parts.chunk(left, budget)
            if n < left:
                parts.cut = rows.req(row)
            extended.append((row, self._extend(parts, row, n)))
            budget -= n
        for row, upto in extended:
            # What only this row generates is of no use to anybody who could be admitted meanwhile.
            upto = min(upto, int(rows.n_entered[row]))
            self._kv.publish(row, rows.ids[row, :upto], upto)
        return budget

    def _extend(self, parts: Parts, row: int, n: int) -> int:
        """Plan the next ``n`` known ids of ``row``; returns how many of its ids are planned then."""
        rows = self._rows
        start = int(rows.planned[row])
        out_loc = self._kv.grow(row, n)
        if out_loc is None:
            self._undo(parts)
            raise OutOfCells
        ids = rows.ids[row]
        parts.add(*column(row, start, n), ids[start : start + n].copy(), out_loc)
        return start + n

    def _left(self, row: int) -> int:
        """Known ids of ``row`` that are to be planned."""
        return int(self._rows.n_ids[row] - self._rows.planned[row] - self._rows.held[row])

    def _undo(self, parts: Parts) -> None:
        """Give back the cells of a plan that will not be made."""
        for group, start in zip(parts.rows, parts.start, strict=True):
            for row, length in zip(group.tolist(), start.tolist(), strict=True):
                self._kv.truncate(row, length)

    def _victim(self) -> int:
        """The row to retract: lowest priority first, then the youngest; the oldest row is never taken,
        and a request that was retracted too often only when there is nobody else."""
        candidates: list[tuple[bool, int, int, int]] = [
            (req.retractions >= MAX_RETRACTIONS, req.request.priority, -age, row)
            for age, row in enumerate(self._rows.running.tolist())
            for req in [self._rows.req(row)]
        ]
        return min(candidates[1:])[-1]

    # -- rows that enter -------------------------------------------------------------------------------

    def _admit(self, parts: Parts, budget: int) -> int:
        """Admit waiting requests in the queue's order while budget, rows and cells last; what nobody wants of it.

        The head is never passed over for lack of memory, so a large request cannot be starved by small ones.
        """
        while budget > 0 and (req := self._queue.head(self._clock())) is not None:
            if self._too_late(parts, req, budget):
                if parts.cut and self._outranks(req, parts.cut) and self._fits(req):
                    self._preempted = parts.cut, req  # its prompt may be long
                return 0
            n = self._try_admit(parts, req, budget)
            if not n and self.stop_background():
                n = self._try_admit(parts, req, budget)
            if not n:
                # Rows of this plan cannot be taken back any more: the next step starts by making room.
                victim = self._preempted_by(req)
                self._preempted = None if victim is None else (victim, req)
                return 0
            budget -= n
        return 0 if parts.cut else budget

    def _too_late(self, parts: Parts, req: Req, budget: int) -> bool:
        """Whether ``req`` would only make others wait: those that generate, as enough enters already; or those that end
        their prompts, where it cannot and would begin with a few tokens, or be the second one that is cut."""
        todo = len(req.ids) - self._queue.length(req) - req.held
        if parts.generating and not parts.cut and todo > 1 and parts.entered * CROWDED >= parts.budget:
            return True
        others = any(n_new[0] > 1 for n_new in parts.n_new)
        few = budget < 2 * parts.reserve
        return todo > budget and not self._whole and (parts.cut is not None or (others and few))

    def _make_room(self, victim: Req, req: Req) -> None:
        """Retract ``victim`` in favour of ``req``, unless either is not there any more."""
        self._preempted = None
        if self._queue.head(self._clock()) is req and self._outranks(req, victim):
            self.retract(victim.row)

    def _preempted_by(self, req: Req) -> Req | None:
        """Who runs and has to make room for ``req``: the youngest of the lowest priority."""
        running = (self._rows.req(row) for row in self._rows.running.tolist())
        candidates = [
            (other.request.priority, -age, other) for age, other in enumerate(running) if self._outranks(req, other)
        ]
        return min(candidates)[-1] if candidates else None

    def _outranks(self, req: Req, other: Req) -> bool:
        """Whether ``other`` has to make room for ``req``, under a preemptive policy."""
        return (
            self._queue.preemptive
            and other.status is Status.RUNNING
            and other.retractions < MAX_RETRACTIONS
            and other.request.priority < req.request.priority
        )

    def _fits(self, req: Req) -> bool:
        """Whether there are cells for ``req``, if everything that it matches stays evictable."""
        reserved = self._reserved(req) if len(self._rows) else 0
        return self._kv.available >= len(req.ids) - self._queue.length(req) + reserved

    def _try_admit(self, parts: Parts, req: Req, budget: int) -> int:
        """Admit ``req`` with at most ``budget`` tokens; returns how many it computes, 0 if it has to wait."""
        if not self._fits(req):
            return 0
        kv, rows = self._kv, self._rows
        reserved = self._reserved(req) if len(rows) else 0
        owner = NOBODY if req.program is None else req.program.number
        admission = kv.admit(req.request.namespace, req.ids, req.match_limit, owner)
        if admission is None:
            return 0
        row, cached_len = admission.row, admission.cached_len
        todo = len(req.ids) - cached_len
        left = todo - req.held
        n = parts.chunk(left, budget)
        fits = kv.available >= todo + reserved and not (self._whole and n < todo) and self._windows_fit(req)
        out_loc = kv.grow(row, n) if fits else None
        if out_loc is None:
            kv.release(row, req.ids, 0)
            return 0
        if n < left:
            parts.cut = req
        parts.entered += n
        self._queue.take(req)
        self._programs.admitted(req, cached_len)
        if not req.started:
            req.cached_len = req.of_prompt(cached_len)
            self.prompt_tokens += req.n_prompt
            self.cached_tokens += req.cached_len
        self._enter(parts, req, admission, n, out_loc)
        return n

    def _enter(self, parts: Parts, req: Req, admission: Admission, n: int, out_loc: Ints) -> None:
        """``req`` runs from now on, with its next ``n`` tokens at ``out_loc``."""
        kv, (row, cached_len) = self._kv, admission
        req.status = Status.RUNNING
        self._rows.enter(row, req, cached_len)
        params = req.request.params
        parts.admitted.append(
            RowInit(
                row=row,
                prefix_locs=kv.row_locs(row, 0, cached_len),
                ids=req.ids,
                n_prompt=req.n_prompt,
                params=params,
                seed=req.seed,
                eos_ids=end_ids(req.request, self._eos_ids),
                logprob_from=req.logprob_from,
                pooling=req.request.pooling,
                adapter=req.adapter,
                window_locs=kv.window_locs(kv.row_locs(row, 0, cached_len)),
            )
        )
        parts.add(*column(row, cached_len, n), req.ids[cached_len : cached_len + n], out_loc)
        kv.publish(row, req.ids, cached_len + n)

    def _reserved(self, req: Req) -> int:
        """Cells to leave for rows that run: the rest of their prompts, and a share of what they may generate."""
        rows, running = self._rows, self._rows.running
        known = rows.n_ids[running] + rows.ahead[running]
        prompts = int((known - rows.planned[running]).sum())
        generation = int((rows.limit[running] - known).sum()) + req.limit - len(req.ids)
        return prompts + int(self._headroom * generation) + len(running) * (self._kv.page_size - 1)

    def _windows_fit(self, req: Req) -> bool:
        """Whether ``req`` and all that runs can have their windows at once: nobody has to be retracted for it."""
        rows = self._rows
        if not len(rows):
            return True
        return self._kv.windows_fit(np.append(rows.limit[rows.running], np.int32(req.limit)), self._step_tokens)

    # -- what runs ahead

    def _run_background(self, parts: Parts, budget: int) -> None:
        """Go on with what a program will append, with what the others of this plan have left of the budget."""
        background, rows = self._background, self._rows
        if not background:
            return
        others = sum(len(tokens) for tokens in parts.tokens)
        budget = min(budget, max(1, others // BESIDE) if others else background.alone)
        req = background.next() if budget else None
        if req is None or (not others and req.row != NO_ROW and rows.in_flight[req.row]):
            return  # whoever arrives waits for one such step at most
        assert req.program is not None
        owner, admission = req.program.number, None
        if req.row == NO_ROW:
            admission = self._kv.admit(req.request.namespace, req.ids, req.match_limit, owner)
            if admission is None:
                return
            row, start = admission
            background.began(req, start)
        else:
            row, start = req.row, int(rows.planned[req.row])
        n = self._kv.spare(row, min(budget, len(req.request.prompt) - start), owner)
        out_loc = self._kv.grow(row, n) if n else None
        if admission is not None and out_loc is not None:
            self._enter(parts, req, admission, n, out_loc)
        elif admission is not None:
            self._kv.release(row, req.ids, 0)
            background.stopped(req)
        elif out_loc is not None:
            ids = rows.ids[row, : start + n]
            parts.add(*column(row, start, n), ids[start:].copy(), out_loc)
            self._kv.publish(row, ids, start + n)
        elif start < len(req.request.prompt):
            self.stop_background()
        background.planned(n)

    def stop_background(self) -> bool:
        """What runs ahead gives its row back, with the next commit where it is in flight; whether it did so at once."""
        req = self._background.running
        if req is None:
            return False
        rows, row = self._rows, req.row
        self.close(req)
        if rows.in_flight[row]:
            return False
        self.vacate(row, int(rows.computed[row]))
        return True

    def _next_suspect(self) -> Flight | None:
        """One suspect alone in a plan. It waits in no queue, and nobody else runs beside it."""
        self.stop_background()
        parts = Parts(self._step_tokens)
        req = self.suspects[0]
        while True:
            self._queue.push(req)
            n = self._try_admit(parts, req, self._step_tokens)
            if n:
                break
            self._queue.remove(req)
            self.retract(self._victim() if len(self._rows) > 1 else int(self._rows.running[0]))
        self.suspects.popleft()
        return self._finish(parts)

    # -- the plan --------------------------------------------------------------------------------------

    def _finish(self, parts: Parts) -> Flight | None:
        """Write the plan and move the rows' planned lengths."""
        if not parts.rows:
            return None
        rows = self._rows
        r, start, n_new = joined(parts.rows), joined(parts.start), joined(parts.n_new)
        end = start + n_new
        known = rows.n_ids[r] + rows.ahead[r]
        sample = (end == known) & (known < rows.limit[r])
        rows.planned[r] = end
        rows.ahead[r] += sample
        rows.in_flight[r] += 1
        self._step += 1
        out_loc = joined(parts.out_loc)
        self.computed_tokens += len(out_loc)
        plan = StepPlan(
            step=self._step,
            released=np.array(self._released, dtype=np.int32) if self._released else EMPTY,
            admitted=tuple(parts.admitted),
            rows=r.astype(np.int32),
            start=start,
            n_new=n_new,
            tokens=joined(parts.tokens),
            out_loc=out_loc,
            sample=sample,
            forced=self._forced(r, start, end, sample) if rows.n_guided else {},
            shared=self._kv.shared(r, start),
            window_loc=self._kv.window_locs(out_loc),
        )
        self._released = []
        return Flight(plan, r, rows.owners(r.tolist()))

    def _forced(self, r: Index, start: Ints, end: Ints, sample: Bools) -> dict[int, tuple[int, Ints]]:
        """The known, generated ids whose logprobs a plan has to report, see :class:`StepPlan`."""
        rows, found = self._rows, {}
        for i in np.flatnonzero(rows.traced[r]).tolist():
            row, req = int(r[i]), rows.req(int(r[i]))
            first = max(req.n_prompt + req.n_sent, int(start[i]) + 1)
            # The token behind a chunk follows from the chunk's last logits.
            last = min(int(end[i]) + (not sample[i]), int(rows.n_ids[row]))
            if first < last:
                found[i] = first, rows.ids[row, first:last].copy()
        return found
