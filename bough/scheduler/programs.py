"""The ledger of programs: what each has cost, what it still holds, and which of them are seated.

A program takes a *seat* when a request of it is admitted and there is room for its KV beside that of the programs
that sit, and keeps the seat between its requests while the pause is worth it. So the KV of few programs stays in the
cache instead of that of many being evicted in turn, which wins more on traces of agents than any order of eviction.
Beyond that room it takes one where a row more saves more time than computing again what then does not fit.
Who sits next is decided by the service that is still expected, in levels: what a call of the program has cost so far,
as often as it says that requests will follow, or else as often as of any other (shortest expected time first; Rothkopf
1966, Scheduling with random service times). In traces of agents what a call costs differs much more between programs
than how many they make; behind very many calls more are expected (Luo et al. 2025, Autellix, arXiv 2502.13965).

Whoever has no envelope is a program of one request and needs no seat.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from bough.base.errors import InvalidRequest, NotFound, program_cancelled
from bough.base.messages import Request
from bough.base.program import Grant, Lease, ProgramInfo, ProgramStats
from bough.base.shares import Shares
from bough.kv.claims import Claims
from bough.scheduler.costs import Costs, learnt
from bough.scheduler.program_state import AHEAD, Ahead, ProgramState, before

if TYPE_CHECKING:
    from bough.scheduler.req import Req

GROWTH = 1.5
"""What a program is taken to need, as a multiple of its latest prompt: it will go on."""
MEMORY_WEIGHT = 8
"""How much more a generated token counts whose context fills the whole pool, because nobody else can run beside it."""
TURN_SHARE = 32
"""Of all service, the turns of programs that waited too long take one part in so many at most."""
TURN_SECONDS = 60.0
"""Whoever has a turn waits so long for room at most, and keeps all others from theirs so long when it has sat down."""
CANCELLED_SECONDS = 10.0
"""Requests of a cancelled program that arrive so soon after were sent before it was."""
PROGRAMS = 4096
"""Programs that are remembered between their requests, and of those that were cancelled, of all tenants together."""
AHEAD_TOKENS = 1 << 22
"""Ids of what was computed ahead and not found yet, of all programs; whose tenant has most loses the oldest."""
AHEAD_RECORD = 128
"""As so many ids counts what there is besides."""


class Programs:
    """All programs that the engine knows.

    Args:
        capacity: tokens that the KV pool holds.
        max_wait: seconds after which a waiting program is due a turn.
    """

    def __init__(self, capacity: int, claims: Claims, max_wait: float) -> None:
        self.max_wait = max_wait
        self.turn_share, self.turn_seconds = TURN_SHARE, TURN_SECONDS
        self.now = 0.0
        self.rows = 0
        """Requests that have a row, with or without a program."""
        self.service = 0
        """Of all programs together."""
        self.grants: dict[str, Grant] = {}
        """What requests that have ended were granted, by rid; the loop puts it into their last outputs."""
        self.fork: tuple[int, str] = (0, "")
        """Program and fork of the branch that was admitted last: its siblings follow."""
        self.single_last = False
        """The request that was admitted last belongs to no program."""
        self.bounded: ProgramState | None = None
        """Whose budget was named by the arrival just now, for the requests that already run as well."""
        self.next_in_line: ProgramState | None = None
        """The waiting program that takes the next seat."""
        self.turn: ProgramState | None = None
        """Whoever goes first, because it waited too long."""
        self._turn_began = self._next_turn = 0
        self._turn_ends = self._no_room_until = 0.0
        self._capacity = capacity
        self.costs = Costs()
        self._claims = claims
        self._states: dict[tuple[str, str], ProgramState] = {}
        self._former: dict[int, ProgramState] = {}  # ended ones whose last requests run on while others have their ids
        self._seated: dict[int, int] = {}  # what each seated program needs
        self._needed = 0
        self._running: dict[int, Req] = {}  # requests of programs that have a row, by order
        self._count = self._ended = 0
        self._prompt_tokens = self._cached_tokens = 0
        self.prefetched = self._used = 0
        self._completions: list[float] = []
        self._leaving: list[tuple[float, int, ProgramState]] = []
        self._due: list[tuple[float, int, ProgramState]] = []
        self._idle: Shares[str] = Shares()
        self._cancelled: dict[tuple[str, str], float] = {}
        self._cancels: Shares[str] = Shares()
        self._moved: dict[int, ProgramState] = {}
        self._ahead: Shares[tuple[ProgramState, Ahead]] = Shares()

    def __len__(self) -> int:
        return len(self._states) + len(self._former)

    @property
    def seated(self) -> int:
        """How many programs have a seat."""
        return len(self._seated)

    def states(self) -> list[ProgramState]:
        """All programs, oldest first."""
        return [*self._former.values(), *self._states.values()]

    def find(self, tenant: str, id: str) -> ProgramState | None:
        return self._states.get((tenant, id))

    def known(self, tenant: str, id: str) -> ProgramState:
        """As :meth:`find`. Raises NotFound for a program that never was, or has ended or been forgotten."""
        if (state := self.find(tenant, id)) is None:
            raise NotFound(f"there is no program {id[:256]!r}", param="program")
        return state

    def moved(self) -> list[ProgramState]:
        """The programs whose rank or seat changed since the last call."""
        moved = list(self._moved.values())
        self._moved.clear()
        return moved

    # -- what the loop tells

    def tick(self, now: float) -> None:
        """Time is ``now``: leases run out, and programs that stay away too long give their seats up."""
        self.now = now
        self._claims.tick(now)
        while self._leaving and self._leaving[0][0] <= now:
            leaves, _, state = heapq.heappop(self._leaving)
            if state.leaves == leaves:
                self.stand(state)
        while self._due and self._due[0][0] <= now:
            deadline, _, state = heapq.heappop(self._due)
            if state.deadline == deadline:  # it is missed, and others may keep theirs
                state.deadline = float("inf")
                self._moved[state.number] = state
        if self.turn is not None and now >= self._turn_ends:
            self._end_turn()

    def check(self, request: Request) -> None:
        """Raises InvalidRequest where the program of ``request`` has used its budget up, or was cancelled just now."""
        named = request.program
        if named is None:
            return
        key = request.namespace.tenant, named.id
        if self.now - self._cancelled.get(key, float("-inf")) < CANCELLED_SECONDS:
            raise program_cancelled(named.id)
        state = self.find(*key)
        if state is None or state.ended:
            return
        budget = min((b for b in (named.budget, state.budget) if b is not None), default=None)
        if budget is not None and state.used >= budget:
            raise InvalidRequest(
                f"the program {named.id!r} has generated its budget of {budget} tokens",
                param="program.budget",
                code="program_budget",
            )

    def arrive(self, req: Req) -> ProgramState | None:
        """The program of ``req``, which is accepted."""
        request = req.request
        named = request.program
        if named is None:
            return None
        key = request.namespace.tenant, named.id
        state = self._states.get(key)
        if state is None or state.ended:
            self._count += 1
            if state is not None:
                self._former[state.number] = state
            state = self._states[key] = ProgramState(key, self._count, self._count, self.now, named.priority)
        elif not state.reqs:
            self._idle.pop(*key)
            away = self.now - state.left
            self.costs.pause, state.pause = learnt(self.costs.pause, away), learnt(state.pause, away)
            state.leaves = float("inf")
        state.priority = max(state.priority, named.priority)
        if named.deadline is not None:
            self._is_due(state, self.now + named.deadline)
        self.bounded = None
        if named.budget is not None:
            if state.budget is None:
                state.spent, self.bounded = state.used, state
            state.budget = named.budget if state.budget is None else min(state.budget, named.budget)
        state.ended |= named.end
        state.node = named.node
        state.to_come = named.next_uses
        state.told_pause = named.next_in if named.pause is None else named.pause
        state.reqs[request.rid] = req
        state.calls += 1
        state.held = len(request.ids) // 4
        self._weigh(state)
        self._settle(state)
        return state

    def _is_due(self, state: ProgramState, deadline: float) -> None:
        """``state`` should be done by ``deadline``, until which that counts."""
        state.deadline = deadline
        heapq.heappush(self._due, (deadline, state.number, state))
        if len(self._due) > 64 + 4 * len(self._states):
            self._due = [(s.deadline, s.number, s) for s in self.states() if s.deadline < float("inf")]
            heapq.heapify(self._due)

    def admitted(self, req: Req, cached_len: int) -> None:
        """``req`` got a row."""
        self.rows += 1
        state = req.program
        self.single_last = state is None
        if state is None:
            return
        self._running[req.order] = req
        named = req.request.program
        assert named is not None
        state.since = self.now
        if state is self.turn:
            self._turn_ends = min(self._turn_ends, self.now + self.turn_seconds)
        self.fork = state.number, named.fork
        if not req.started:
            cached = req.of_prompt(cached_len)
            state.prompt += req.n_prompt
            state.cached += cached
            self._prompt_tokens += req.n_prompt
            self._cached_tokens += cached
            self._find_ahead(state, req, cached_len)
        if not state.seated and (state is self.turn or self.has_room(state)):
            state.seated = True
            self._claims.favour(state.number, True)
            self._settle(state)
        self._serve(state, len(req.ids) - cached_len)

    def vacated(self, req: Req) -> None:
        """``req`` lost its row, and the cache has what it computed."""
        self.rows -= not req.background
        self._running.pop(req.order, None)
        state = req.program
        if state is not None and self.find(*state.key) is not state and state.number not in self._former:
            self._claims.over(state.number)  # a row that was in flight outlived its program

    def runs_ahead(self, state: ProgramState, record: Ahead) -> None:
        """What ``record`` says is being computed for ``state``, which has not asked for it yet."""
        state.ahead.append(record)
        self._ahead.put(state.key[0], (state, record), len(record) + AHEAD_RECORD)
        if len(state.ahead) > AHEAD:
            self._forget_ahead(state, state.ahead[0])
        while self._ahead.size > AHEAD_TOKENS:
            self._forget_ahead(*self._ahead.oldest()[1])

    def _forget_ahead(self, state: ProgramState, record: Ahead) -> None:
        state.ahead.remove(record)
        self._ahead.pop(state.key[0], (state, record))

    def _find_ahead(self, state: ProgramState, req: Req, cached_len: int) -> None:
        for record in list(state.ahead):
            if n := record.found(req, cached_len):
                self._used += n
                self._forget_ahead(state, record)

    def ended(self, req: Req) -> None:
        """``req`` has had its terminal event."""
        state, lease = req.program, req.request.lease
        if state is not None:
            self._leave(state, req)
        if lease is not None or state is not None:
            self.grants[req.request.rid] = self._grant(req, state, lease)

    def close(self, state: ProgramState) -> None:
        """The client says that ``state`` is over; it goes when its last request has ended."""
        state.ended = True
        if not state.reqs:
            self.forget(state)

    def cancel(self, tenant: str, id: str) -> list[Req]:
        """As :meth:`close`; requests of it that are still on their way are refused, be they its first ones.

        Returns the requests of that id that are in the engine. Raises NotFound as :meth:`known`.
        """
        self._cancelled[tenant, id] = self.now
        self._cancels.put(tenant, id)
        if self._cancels.size > PROGRAMS:
            oldest = self._cancels.oldest()
            self._cancels.pop(*oldest)
            del self._cancelled[oldest]
        reqs = [req for one in self._former.values() if one.key == (tenant, id) for req in one.reqs.values()]
        if not reqs or self.find(tenant, id) is not None:
            state = self.known(tenant, id)
            reqs += state.reqs.values()
            self.close(state)
        return reqs

    def _leave(self, state: ProgramState, req: Req) -> None:
        named = req.request.program
        assert named is not None
        del state.reqs[req.request.rid]
        state.generated += req.n_generated
        self.costs.answered(req.n_generated)
        state.spent = max(state.spent, state.generated)
        fullness = (req.n_prompt + req.n_sent / 2) / self._capacity
        self._serve(state, int(req.n_sent * (1 + MEMORY_WEIGHT * fullness)))
        if state.reqs:
            return
        state.left = self.now
        if state.ended:
            self.forget(state)
            return
        pause = next((p for p in (named.pause, named.next_in, state.pause) if p is not None), self.costs.pause)
        other = None if state is self.turn else self.next_in_line
        if not state.seated or named.next_uses == 0 or pause > self._patience or (other and before(other, state)):
            self.stand(state)
        else:
            state.leaves = self.now + 2 * pause + 1
            heapq.heappush(self._leaving, (state.leaves, state.number, state))
        self._idle.put(*state.key, last=state.budget is not None)
        if self._idle.size > PROGRAMS:
            self.forget(self._states[self._idle.oldest()])

    def _grant(self, req: Req, state: ProgramState | None, lease: Lease | None) -> Grant:
        answer, tokens, seconds = None, 0, 0.0
        if lease is not None:
            answer, tokens, seconds = self._claims.lease(req.request.namespace, req.request.prompt, lease, self.now)
        if state is None:
            return Grant(lease=answer, lease_tokens=tokens, lease_seconds=seconds)
        left = None if state.budget is None else max(0, state.budget - state.spent)
        return Grant(state.key[1], state.generated, left, state.seated, answer, tokens, seconds)

    # -- what can be seen

    def describe(self, tenant: str, id: str | None = None) -> list[ProgramInfo]:
        """The programs of ``tenant``, oldest first, or the one that is named. Raises NotFound where there is none."""
        if id is not None:
            return [self._info(self.known(tenant, id))]
        return [self._info(state) for state in self._states.values() if state.key[0] == tenant]

    def _info(self, state: ProgramState) -> ProgramInfo:
        running = sum(req.row >= 0 for req in state.reqs.values())
        return ProgramInfo(
            id=state.key[1],
            node=state.node,
            age=self.now - state.opened,
            idle=None if state.reqs else self.now - state.left,
            calls=state.calls,
            running=running,
            waiting=len(state.reqs) - running,
            prompt_tokens=state.prompt,
            cached_tokens=state.cached,
            generated_tokens=state.generated + sum(req.n_generated for req in state.reqs.values()),
            kept_tokens=self._claims.tokens(state.number),
            service=state.service,
            budget=None if state.budget is None else max(0, state.budget - state.spent),
            deadline=None if state.deadline == float("inf") else state.deadline - self.now,
            pause=state.pause if state.told_pause is None else state.told_pause,
            priority=state.priority,
            seated=state.seated,
        )

    def stats(self) -> ProgramStats:
        """Counters and gauges; the completions are those since the previous call."""
        completions, self._completions = self._completions, []
        answers = self._claims.answers
        return ProgramStats(
            known=len(self),
            seated=len(self._seated),
            opened=self._count,
            ended=self._ended,
            forgotten=self._count - self._ended - len(self),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            leased_tokens=self._claims.leased_tokens,
            granted=answers["granted"],
            clipped=answers["clipped"],
            denied=answers["denied"],
            prefetched_tokens=self.prefetched,
            used_tokens=self._used,
            completions=completions,
        )

    # -- turns

    def take_turn(self, state: ProgramState) -> None:
        """``state``, of all programs the one that has waited the longest, goes first if that is due.

        A turn is the next free seat, or after a minute one that there is no room for, and lasts until the program gives
        it up, has had a whole pool of service or sat for a minute. The next turn may begin when all programs together
        have had ``turn_share`` times the service of this one.
        """
        if self.turn is None and self.service >= self._next_turn and self.now - state.since > self.max_wait:
            self.turn = state
            self._turn_began, self._turn_ends = state.service, float("inf")
            self._no_room_until = self.now + self.turn_seconds

    @property
    def turn_is_up(self) -> bool:
        """Whoever has a turn goes before all others now."""
        turn = self.turn
        return turn is not None and (turn.seated or self.has_room(turn) or self.now >= self._no_room_until)

    def _end_turn(self) -> None:
        assert self.turn is not None
        self._next_turn = self.service + self.turn_share * (self.turn.service - self._turn_began)
        self.turn = None

    # -- seats

    @property
    def _patience(self) -> float:
        """Seconds of absence through which a seat is kept.

        Keeping ``held`` tokens for t seconds wastes held * t of the pool; computing them anew stops the whole pool for
        the time that takes. The first is less while t is below the time of computing a whole pool. (Memory times time
        as the waste of a pause is from Abhyankar et al. 2024, InferCept, arXiv 2402.01869.)
        """
        return self._capacity * self.costs.token_seconds or float("inf")

    def has_room(self, state: ProgramState) -> bool:
        """There is a free seat for ``state``, always when nobody sits, or one more is worth it.

        It is where a row more saves more seconds than computing anew what then does not fit beside the others.
        """
        need = int(GROWTH * state.held)
        over = self._needed + need - self._capacity
        return not self._seated or (self._pays(over, need) and self._pays(over + self._grown(), need))

    def _pays(self, over: int, need: int) -> bool:
        """One that needs so many tokens may sit where the pool has ``over`` too few then."""
        costs = self.costs
        return over <= 0 or 0 < min(over, need) * costs.token_seconds <= costs.gain(self.rows)

    def _grown(self) -> int:
        """Tokens that the seated programs hold, with what they generate, beyond what they were taken to need."""
        held: dict[int, int] = {}
        for req in self._running.values():
            state = req.program
            if state is not None and state.seated:
                held[state.number] = held.get(state.number, state.held) + req.n_sent
        return sum(max(0, n - self._seated[number]) for number, n in held.items())

    def stand(self, state: ProgramState) -> None:
        """``state`` gives its seat up, and its turn."""
        if state is self.turn:
            self._end_turn()
        if state.seated:
            state.seated = False
            self._claims.favour(state.number, False)
            self._settle(state)

    def forget(self, state: ProgramState) -> None:
        """``state`` is over: what only it used goes first."""
        if state.ended:
            self._ended += 1
            self._completions.append(state.left - state.opened)
        self.stand(state)
        for record in list(state.ahead):
            self._forget_ahead(state, record)
        state.deadline = float("inf")  # whose entry is due later finds nothing to do
        self._claims.over(state.number)
        self._moved.pop(state.number, None)
        if self._former.pop(state.number, None) is None:
            self._idle.pop(*state.key)
            del self._states[state.key]

    def _settle(self, state: ProgramState) -> None:
        """Write down how much ``state`` needs now, and that it may have moved."""
        self._needed -= self._seated.pop(state.number, 0)
        if state.seated:
            need = self._seated[state.number] = int(GROWTH * state.held)
            self._needed += need
        self._moved[state.number] = state

    def _serve(self, state: ProgramState, n_tokens: int) -> None:
        state.service += n_tokens
        self.service += n_tokens
        self._weigh(state)
        if state is self.turn and state.service - self._turn_began >= self._capacity:
            self._end_turn()

    def _weigh(self, state: ProgramState) -> None:
        """What is expected of ``state`` may have changed.

        The first level ends at a whole pool of service, each further one is twice as wide: so programs of about equal
        service do not take turns at every call, at the cost of the cache.
        """
        state.level = (state.expected // self._capacity).bit_length()
        self._moved[state.number] = state
