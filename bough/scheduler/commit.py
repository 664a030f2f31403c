"""Commit: applies a StepResult to the rows, finishes requests and writes the news for their readers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from bough.base.messages import Finish, Logprob, Output
from bough.base.plan import Bools, Index, Ints, PositionLogprobs, StepResult
from bough.scheduler.constraints import Constraints
from bough.scheduler.finish import OVER_BUDGET, stop_reason
from bough.scheduler.planner import Flight, Planner
from bough.scheduler.req import Req, Status
from bough.scheduler.rows import Rows

log = logging.getLogger(__name__)


class Committer:
    """The only place where a running request gains tokens or ends."""

    def __init__(self, rows: Rows, planner: Planner, constraints: Constraints) -> None:
        self._rows = rows
        self._planner = planner
        self._constraints = constraints
        self.generated_tokens = 0
        self.finished = 0

    def commit(self, flight: Flight, result: StepResult) -> list[Output]:
        """Apply ``result``; returns the news of the step, in plan order.

        A row whose request ended while the step was in flight discards what the step sampled for it.
        """
        rows, plan, r = self._rows, flight.plan, flight.rows
        rows.in_flight[r] -= 1
        rows.computed[r] = plan.start + plan.n_new
        if not rows.n_guided and len(result.tokens) == len(r) and False not in rows.live[r].tolist():
            # A step of decodes, as in Planner._plan_running.
            rows.ahead[r] -= 1
            look = self._append(r, result.tokens)
            outputs = self._outputs(flight, result, range(len(r)), result.tokens, look)
        else:
            outputs = self._tell_apart(flight, result)
        for i, failure in result.failed.items():
            req = flight.reqs[i]
            if req.background:
                self._close(req)
            elif req.status is Status.RUNNING:
                outputs.append(terminal(req, Finish("error", message=failure.message, status=failure.status)))
                self._close(req)
        if False in rows.live[r].tolist():
            for row in r[~rows.live[r] & (rows.in_flight[r] == 0)].tolist():
                self._vacate(row)
        return outputs

    def _tell_apart(self, flight: Flight, result: StepResult) -> list[Output]:
        """The news of rows of which some have sampled, some not, and some what was known before."""
        rows, plan, r = self._rows, flight.plan, flight.rows
        unknown = plan.sample
        if rows.n_guided:
            foreseen = plan.sample & (rows.foreseen[r] > 0)
            rows.foreseen[r] -= foreseen
            unknown = plan.sample & ~foreseen
        rows.ahead[r] -= unknown
        live = rows.live[r]
        for i in result.failed:
            live[i] = False
        sampled = live & (result.counts > 0)
        tokens = np.zeros(len(r), dtype=np.int32)
        tokens[result.counts > 0] = result.tokens
        new = np.flatnonzero(sampled & unknown)
        look = self._append(r[new], tokens[new])
        free = ~rows.guided[r[new]]
        mine = new[free]
        outputs = self._outputs(flight, result, mine.tolist(), tokens[mine], look[free])
        self._silent(flight, result, sampled, outputs)
        if rows.n_guided:
            fresh = set(new.tolist())
            for i in np.flatnonzero(rows.guided[r] & rows.live[r]).tolist():
                outputs += self._guided(flight.reqs[i], flight, result, i, int(tokens[i]), i in fresh)
        return outputs

    def _append(self, r: Index, tokens: Ints) -> Bools:
        """Append one id to each row of ``r`` [N]; returns [N] which ones need a closer look, whatever their ids."""
        rows = self._rows
        n = rows.n_ids[r]
        rows.flat[rows.begin[r] + n] = tokens
        n += 1
        rows.n_ids[r] = n
        look: Bools = n >= rows.look_from[r]
        return look

    def _outputs(
        self, flight: Flight, result: StepResult, where: Sequence[int], tokens: Ints, look: Bools
    ) -> list[Output]:
        """News of the rows at the plan indices ``where`` [N], which have got ``tokens`` [N]."""
        rows, r = self._rows, flight.rows
        outputs: list[Output] = []
        for i, token, close_look in zip(where, tokens.tolist(), look.tolist(), strict=True):
            req = flight.reqs[i]
            finish: Finish | None = None
            logprobs: list[Logprob] | None = None
            news = [token]
            if close_look or token in req.stops:
                finish = self._judge(req, token, int(rows.n_ids[r[i]]))
                if finish is OVER_BUDGET:
                    news = []
                elif i in result.logprobs:
                    logprobs = [_wire(p) for p in result.logprobs[i]]
            outputs.append(
                Output(
                    req.request.rid,
                    req.n_sent,
                    news,
                    req.n_prompt,
                    req.cached_len,
                    finish,
                    logprobs,
                    self._prompt_logprobs(req, result, i) if result.prompt_logprobs else None,
                )
            )
            req.n_sent += len(news)
            self.generated_tokens += len(news)
            if finish is not None:
                self._close(req)
        return outputs

    def _silent(self, flight: Flight, result: StepResult, sampled: Bools, outputs: list[Output]) -> None:
        """Rows that sampled nothing: chunks of prompts, and requests that wanted prompt logprobs or a vector."""
        rows = self._rows
        waiting = ~sampled & rows.live[flight.rows] & ~rows.guided[flight.rows]
        for i in np.flatnonzero(waiting).tolist():
            if i in result.failed:
                continue
            req, row = flight.reqs[i], int(flight.rows[i])
            done = rows.computed[row] == rows.n_ids[row] >= rows.limit[row]
            if req.background:
                if done:
                    self._close(req)
                continue
            prompt_logprobs = self._prompt_logprobs(req, result, i)
            if done or prompt_logprobs:
                pooled = result.pooled[i].astype("<f4").tobytes() if done and i in result.pooled else None
                finish = None if not done else Finish("length" if pooled is None else "stop")
                outputs.append(
                    Output(
                        req.request.rid, req.n_sent, [], req.n_prompt, req.cached_len, finish, None, prompt_logprobs,
                        pooled,
                    )
                )  # fmt: skip
                if done:
                    self._close(req)

    def _guided(self, req: Req, flight: Flight, result: StepResult, i: int, token: int, new: bool) -> list[Output]:
        """News of a constrained request: what was sampled for it, and what that forces.

        Forced tokens are sent at once; where logprobs are reported, with the step that computes them. ``new`` says
        that ``token`` was sampled and was not known before.
        """
        rows, row, plan = self._rows, req.row, flight.plan
        end = int(plan.start[i] + plan.n_new[i])
        sampled = result.counts[i] > 0
        finish = self._accept(req, token) if new else None
        if sampled and not new and rows.ids[row, end] != token:
            finish = Finish("error", message="the engine sampled another token than the forced one", status=500)
        upto = 0 if finish is not None else int(rows.n_ids[row])
        if rows.traced[row]:
            upto = min(upto, req.n_prompt + req.n_sent + len(result.logprobs.get(i, ())))
        elif end < req.n_prompt or (max(1, req.logprob_from) < req.n_prompt and i not in result.prompt_logprobs):
            upto = 0  # nothing is said before the prompt has been read and its logprobs reported
        first = req.n_prompt + req.n_sent
        tokens: list[int] = rows.ids[row, first:upto].tolist()
        for k, known in enumerate(tokens):
            ending = self._judge(req, known, first + k + 1)
            if ending is not None:
                finish, tokens = ending, tokens[: k + (ending is not OVER_BUDGET)]
                break
        if finish is None and i in result.failed:
            finish = Finish("error", message=result.failed[i].message, status=result.failed[i].status)
        if finish is None and rows.computed[row] == rows.n_ids[row] >= rows.limit[row]:
            finish = Finish("length")  # only the logprobs of the prompt were asked for
        prompt_logprobs = self._prompt_logprobs(req, result, i)
        if not tokens and finish is None and not prompt_logprobs:
            return []
        logprobs = [_wire(p) for p in result.logprobs[i][: len(tokens)]] if i in result.logprobs else None
        output = Output(
            req.request.rid, req.n_sent, tokens, req.n_prompt, req.cached_len, _warned(req, finish), logprobs,
            prompt_logprobs,
        )  # fmt: skip
        req.n_sent += len(tokens)
        self.generated_tokens += len(tokens)
        if finish is not None:
            self._close(req)
        return [output]

    def _accept(self, req: Req, token: int) -> Finish | None:
        try:
            return self._constraints.accept(req, token)
        except Exception as error:
            log.exception("the matcher of one request failed")
            return Finish("error", message=f"the grammar failed: {type(error).__name__}", status=500)

    def _judge(self, req: Req, token: int, n_ids: int) -> Finish | None:
        try:
            return stop_reason(req, token, n_ids)
        except Exception as error:
            log.exception("a stop rule of one request failed")
            return Finish("error", message=f"a stop rule failed: {type(error).__name__}", status=500)

    def _prompt_logprobs(self, req: Req, result: StepResult, i: int) -> list[Logprob] | None:
        positions = result.prompt_logprobs.get(i)
        if not positions:
            return None
        # The first token of a prompt has no logprob: the entries are those of positions from 1 on.
        req.logprob_from = max(req.logprob_from, 1) + len(positions)
        return [_wire(p) for p in positions]

    def end(self, req: Req, finish: Finish) -> Output:
        """End a running request now; its row goes as soon as no step in flight contains it."""
        row = req.row
        self._close(req)
        if self._rows.in_flight[row] == 0:
            self._vacate(row)
        return terminal(req, finish)

    def _close(self, req: Req) -> None:
        self._planner.close(req)
        self.finished += not req.background

    def _vacate(self, row: int) -> None:
        # The last id is left out even where an overlapped step has computed its KV, so that what the cache
        # holds does not depend on the depth.
        rows = self._rows
        self._planner.vacate(row, min(int(rows.computed[row]), int(rows.n_ids[row]) - 1))


def terminal(req: Req, finish: Finish) -> Output:
    """The last output of ``req``, without tokens."""
    return Output(req.request.rid, req.n_sent, [], req.n_prompt, max(req.cached_len, 0), finish)


def _warned(req: Req, finish: Finish | None) -> Finish | None:
    """``finish`` with the warnings about the constraint of ``req``."""
    if finish is None or req.guide is None or not req.guide.warnings:
        return finish
    return msgspec.structs.replace(finish, warnings=req.guide.warnings)


def _wire(p: PositionLogprobs) -> Logprob:
    return Logprob(p.token, p.logprob, p.rank, p.top, p.asked)
