"""Req: the scheduler's state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from bough.base.messages import Request
from bough.base.plan import NO_ADAPTER, Ints
from bough.scheduler.guide import Guide
from bough.scheduler.program_state import ProgramState
from bough.text.stop import StopMatcher

NO_ROW = -1


class Status(Enum):
    """Where a Req is. ``GATED -> WAITING <-> RUNNING -> FINISHED``; every state can finish."""

    GATED = "gated"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Req:
    """One sequence from arrival to its terminal event.

    While it runs, its ids and lengths live in :class:`bough.scheduler.rows.Rows` under ``row``; ``ids`` is
    then stale and is refreshed when the row is taken away (retraction).

    Attributes:
        request: the immutable wire object.
        order: arrival number, the deterministic tie-break everywhere.
        arrival: clock reading at arrival, seconds.
        deadline: clock reading at which it times out; infinity without a timeout.
        seed: seed of its draws.
        limit: most ids it may ever have, prompt included.
        stop: matcher of stop strings and patterns, None when there are none.
        ids: all known ids while it does not run.
        status, row: see :class:`Status`.
        cached_len: tokens taken from the cache at its first admission; -1 before.
        n_sent: generated tokens already put into an output.
        stops: ids that end it.
        logprob_from: next prompt position whose logprob is to be reported.
        retractions: how often its row was taken away.
        failures: failed forwards it took part in.
        guide: state of its constraint, None without one.
        adapter: the place of its adapter, once it is loaded; NO_ADAPTER without one.
        program: what it is a part of, None for a program of one request.
        background: nobody asked for it: it is what a program is about to append.
    """

    request: Request
    order: int
    arrival: float
    deadline: float
    seed: int
    limit: int
    stop: StopMatcher | None
    ids: Ints
    logprob_from: int
    status: Status = Status.WAITING
    row: int = NO_ROW
    cached_len: int = -1
    n_sent: int = 0
    stops: frozenset[int] = frozenset()
    retractions: int = 0
    failures: int = 0
    guide: Guide | None = None
    adapter: int = NO_ADAPTER
    program: ProgramState | None = None
    background: bool = False

    @property
    def n_prompt(self) -> int:
        return len(self.request.ids) // 4

    @property
    def n_generated(self) -> int:
        """Tokens that it has generated so far, as programs count them."""
        return 0 if self.request.unseen else self.n_sent

    @property
    def started(self) -> bool:
        """It has run before, so others may already be waiting for its tokens."""
        return self.cached_len >= 0

    def of_prompt(self, cached_len: int) -> int:
        """How much of the prompt is among ``cached_len`` tokens from the cache, where what a grammar forces at once may
        be, too. As without that, the last token of a prompt is not."""
        return min(cached_len, self.n_prompt - 1)

    @property
    def match_limit(self) -> int:
        """Most tokens that may come from the cache.

        The last known token is always computed, because its logits are needed; so is everything from the
        position before the first logprob that is still wanted. A held request computes its last token later, and
        something before it now.
        """
        if self.request.pooling is not None and self.request.pooling.kind in ("mean", "first"):
            return 0  # it takes hidden states from the first token on
        limit = len(self.ids) - 1 - self.held
        if self.logprob_from < self.n_prompt:
            limit = min(limit, self.logprob_from - 1)
        if self.request.params.logprobs is not None:
            limit = min(limit, self.n_prompt + self.n_sent - 1)
        return max(limit, 0)

    @property
    def held(self) -> bool:
        """Its matcher is still being made, so it may not sample yet."""
        return self.guide is not None and self.guide.matcher is None


def end_ids(request: Request, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The end-of-sequence ids that end ``request``; behind a complete constrained answer nothing else can follow."""
    ignored = request.params.ignore_eos and request.constraint is None
    return () if ignored else eos_ids


def initial_logprob_from(request: Request) -> int:
    """First prompt position whose logprob is wanted; the prompt's length when none is."""
    n_prompt = len(request.ids) // 4
    if request.params.prompt_logprobs is None:
        return n_prompt
    return min(request.params.logprob_start, n_prompt)


EMPTY: Ints = np.empty(0, dtype=np.int32)
