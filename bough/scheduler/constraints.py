"""Constraints: compiles that hide behind prefills, masks for the rows that sample, and forced tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np

from bough.base.constraint import Constraint
from bough.base.errors import BoughError, InvalidRequest
from bough.base.messages import Finish
from bough.base.plan import Bools, Ints, Masks
from bough.grammar.base import WORD, Backend, Matcher
from bough.grammar.compiler import Ticket
from bough.grammar.reasoning import ReasoningMatcher, allow, write_only
from bough.grammar.tags import Tags
from bough.scheduler.gates import GateState
from bough.scheduler.guide import Guide
from bough.scheduler.planner import Flight
from bough.scheduler.queue import WaitQueue
from bough.scheduler.req import Req, Status
from bough.scheduler.rows import Rows

log = logging.getLogger(__name__)

RUN = 64
"""Most forced ids that are appended at one time; the rest of a longer run follows step by step."""

JUMPY_ROWS = 4
"""Beyond so many rows a step takes longer for its forced tokens, and the host's work for all rows no longer hides."""

PATIENCE_SECONDS = 0.005
"""So long a request is not admitted because of its compile. Most compiles take less, and whoever is prefilled before
the matcher is there pays a step of its own for the last token."""


class Compiler(Protocol):
    """What :class:`bough.grammar.compiler.GrammarCompiler` is to the scheduler."""

    backend: Backend
    tags: Tags

    def start(self, constraint: Constraint, tenant: str = "") -> Ticket: ...
    def drop(self, ticket: Ticket) -> None: ...
    def collect(self) -> None: ...


class Constraints:
    """Owns the guides of all requests.

    A Gate too, for a moment: most compiles are over before a step could be. Then requests are admitted and prefilled
    meanwhile, up to the last token. Only a prompt of a single token cannot hide its compile, and waits.
    """

    def __init__(
        self,
        compiler: Compiler | None,
        rows: Rows,
        queue: WaitQueue,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        jump: bool,
        clock: Callable[[], float],
    ) -> None:
        self._compiler = compiler
        self._rows = rows
        self._queue = queue
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._jump = jump
        self._clock = clock
        self._bits: Ints = np.zeros((len(rows.live), -(-vocab_size // WORD)), np.int32)
        self._compiling: dict[int, Req] = {}
        self.forced_tokens = 0

    # -- the compile

    def start(self, req: Req) -> None:
        """Give ``req`` its guide and start its compile; raises InvalidRequest for what is refused at once."""
        request = req.request
        if request.constraint is None and request.reasoning is None:
            return
        params = request.params
        # What a sampler's rule forbids must not be forced.
        req.guide = Guide(jumps=self._jump and not params.allowed_token_ids and not params.bad_words)
        if self._compiler is None:
            param = "reasoning" if request.constraint is None else request.constraint.kind
            raise InvalidRequest("this engine cannot constrain its answers", param=param)
        if request.constraint is not None:
            req.guide.ticket = self._compiler.start(request.constraint, request.namespace.tenant)
            self._compiling[req.order] = req
        self._look(req)

    def poll(self, req: Req) -> GateState:
        """Whether ``req`` may be admitted; raises what its compile raised."""
        self._look(req)
        if not req.held or (len(req.ids) > 1 and self._clock() - req.arrival >= PATIENCE_SECONDS):
            return GateState.READY
        return GateState.PENDING

    def cancel(self, req: Req) -> None:
        self._compiling.pop(req.order, None)
        if self._compiler is not None and req.guide is not None and req.guide.ticket is not None:
            self._compiler.drop(req.guide.ticket)
            req.guide.ticket = None

    def settle(self) -> list[tuple[Req, Exception]]:
        """Take in the compiles that are over; returns those that failed, with the reason."""
        failed: list[tuple[Req, Exception]] = []
        if self._compiler is not None and self._compiling:
            self._compiler.collect()
        for req in list(self._compiling.values()):
            if req.status is Status.FINISHED:
                self.cancel(req)
                continue
            try:
                self._look(req)
            except Exception as error:
                self.cancel(req)
                failed.append((req, error))
        return failed

    def _look(self, req: Req) -> None:
        guide = req.guide
        if guide is None or guide.matcher is not None:
            return
        matcher: Matcher | None = None
        reasoning, compiler = req.request.reasoning, self._compiler
        assert compiler is not None
        if guide.ticket is not None:
            ready = reasoning is None or compiler.tags(reasoning.end).ready
            template = guide.ticket.poll()
            if template is None or not ready:
                return
            matcher, guide.warnings, guide.ticket = template.matcher(), template.warnings, None
        if reasoning is not None:
            matcher = ReasoningMatcher(reasoning, compiler.tags, self._eos_ids, matcher)
        self.cancel(req)
        self._begin(req, guide, matcher)

    def _begin(self, req: Req, guide: Guide, matcher: Matcher | None) -> None:
        """From now on ``req`` may sample; what is forced from the start is part of its prefill."""
        if req.status is Status.RUNNING:
            guide.matcher = matcher
            self._rows.held[req.row] = False
            self.jump(req)
            return
        queued = self._queue.holds(req)
        if queued:
            self._queue.remove(req)
        guide.matcher = matcher
        forced = self._forced(req, len(req.ids))
        if forced:
            req.ids = np.concatenate((req.ids, np.array(forced, np.int32)))
        if queued:
            self._queue.push(req)

    # -- sampling

    def jumpy(self) -> bool:
        """Whether the next plan should know what is in flight, because all that runs is likely to be forced on.

        A plan that is made before costs a forward for each forced run: it takes the one token that is sampled, and
        those that are forced behind it have to wait for the next.
        """
        rows = self._rows
        running = rows.running
        return (
            0 < len(running) <= JUMPY_ROWS
            and bool(rows.guided[running].all())
            and all(req.guide is not None and req.guide.jumpy for req in rows.owners(running.tolist()))
        )

    def concern(self, flight: Flight) -> Bools | None:
        """[B] which rows of ``flight`` sample under a matcher, and so need the tokens of all steps before; or None."""
        if not self._rows.n_guided:
            return None
        concerned = flight.plan.sample & self._rows.guided[flight.rows]
        return concerned if concerned.any() else None

    def masks(self, flight: Flight, concerned: Bools) -> tuple[Masks | None, list[tuple[Req, Finish]]]:
        """The masks for sampling ``flight``, and the requests whose matcher gave up, with their end.

        Everything before ``flight`` is committed, so each matcher stands where its row samples, or behind the token
        that it forces there.
        """
        rows = self._rows
        indices: list[int] = []
        filled: list[tuple[Matcher, int]] = []
        openings: list[tuple[int, int]] = []
        for i in np.flatnonzero(concerned).tolist():
            row, n = int(flight.rows[i]), len(indices)
            guide = flight.reqs[i].guide
            if not rows.live[row] or guide is None or guide.matcher is None:
                continue
            if rows.foreseen[row]:
                write_only(self._bits[n], int(rows.ids[row, flight.plan.start[i] + flight.plan.n_new[i]]))
            elif guide.matcher.free:
                continue
            elif not guide.jumps and (forced := guide.matcher.forced(1)):
                # That is known of a whole run at once, where a mask costs the host's time for each of its tokens.
                write_only(self._bits[n], forced[0])
            elif guide.matcher.ended:
                write_only(self._bits[n], self._eos_ids[0])
            elif isinstance(matcher := guide.matcher, ReasoningMatcher) and matcher.inside:
                matcher.write(self._bits[n], self._vocab_size)
            else:
                inner: Matcher | None = guide.matcher
                if isinstance(matcher, ReasoningMatcher):
                    inner = matcher.inner
                    if matcher.opening is not None:
                        openings.append((n, matcher.opening))
                assert inner is not None
                filled.append((inner, n))
            indices.append(i)
        if filled:
            assert self._compiler is not None
            self._compiler.backend.fill(filled, self._bits)
        for n, token in openings:
            allow(self._bits[n], token)
        failed = self._failures(flight, indices, filled)
        if not indices:
            return None, failed
        return Masks(np.array(indices, np.int32), self._bits[: len(indices)]), failed

    @staticmethod
    def _failures(flight: Flight, indices: list[int], filled: list[tuple[Matcher, int]]) -> list[tuple[Req, Finish]]:
        reqs = [flight.reqs[indices[n]] for _, n in filled]
        found = [(req, _given_up(req, matcher)) for req, (matcher, _) in zip(reqs, filled, strict=True)]
        return [(req, finish) for req, finish in found if finish is not None]

    # -- tokens

    def accept(self, req: Req, token: int) -> Finish | None:
        """Move over ``token``, which was sampled for ``req`` and is in its row; then append what it forces.

        Returns the end of the request where it cannot go on, None if it can.
        """
        guide = req.guide
        assert guide is not None and guide.matcher is not None
        if not guide.matcher.accept(token):
            reason = f"the grammar failed: token {token} is not in the constraint's language"
            return _given_up(req, guide.matcher) or Finish("error", message=reason, status=500)
        guide.sampled += 1
        if guide.jumps:
            guide.runs += self.jump(req)
        return _given_up(req, guide.matcher)

    def jump(self, req: Req) -> bool:
        """Append the ids that the matcher forces to the row of ``req``; whether there are any."""
        forced = self._forced(req, int(self._rows.n_ids[req.row]))
        if forced:
            self._rows.foresee(req.row, forced)
        if req.guide is not None and req.guide.complete:
            self._rows.limit[req.row] = self._rows.n_ids[req.row]
        return bool(forced)

    def _forced(self, req: Req, n_ids: int) -> list[int]:
        """Ids that must follow the ``n_ids`` known ones, taken in by the matcher.

        At least one token is left to be sampled, so that the length ends an answer as it always does.
        """
        guide, params = req.guide, req.request.params
        assert guide is not None and guide.matcher is not None
        taken: list[int] = []
        if not guide.jumps:
            return taken
        room = min(req.limit - n_ids - 1, RUN)
        early = req.n_prompt + params.min_tokens
        while len(taken) < room and (forced := guide.matcher.forced(room - len(taken))):
            for token in forced:
                # The sampler forbids these ids here, and says so.
                if n_ids + len(taken) < early and token in req.stops:
                    return taken
                if not guide.matcher.accept(token):
                    return taken
                taken.append(token)
                guide.complete = token in self._eos_ids
        self.forced_tokens += len(taken)
        return taken


def _given_up(req: Req, matcher: Matcher) -> Finish | None:
    """The end of ``req`` where ``matcher`` has come to its bounds: the constraint takes more work than any may."""
    reason = matcher.error()
    if reason is None:
        return None
    kind = None if req.request.constraint is None else req.request.constraint.kind
    return Finish("error", message=f"{kind}: too complex to be enforced: {reason}", status=400, param=kind)


def reason_of(error: Exception) -> tuple[str, int, str | None]:
    """(message, status, param) for the client whose compile raised ``error``."""
    if isinstance(error, BoughError):
        return error.message, error.status, error.param
    log.error("a compile failed", exc_info=error)
    return f"the compile of the grammar failed: {type(error).__name__}", 500, None
