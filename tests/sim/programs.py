"""What the engine must know of programs, kept by the simulation for itself: who belongs together, and their budgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from bough.base.messages import Request
from bough.kv.claims import LEASE_SHARE
from bough.kv.manager import KVManager
from bough.kv.node import NOBODY, Node
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree
from bough.scheduler.finish import OVER_BUDGET
from bough.scheduler.loop import Scheduler
from bough.scheduler.program_policy import ProgramPolicy, fork_of
from bough.scheduler.program_state import ProgramState
from bough.scheduler.programs import CANCELLED_SECONDS, GROWTH
from bough.scheduler.req import Req

from .invariants import nodes
from .pipeline import require

Key = tuple[str, str]
TICKS = 0.015
"""Seconds that may have passed since the scheduler last looked at the clock."""


@dataclass(slots=True)
class _Account:
    key: Key
    budget: int | None
    spent: int = 0
    ended: bool = False
    rids: dict[str, None] = field(default_factory=dict)


def key_of(request: Request) -> Key | None:
    return None if request.program is None else (request.namespace.tenant, request.program.id)


class Accounts:
    """The programs of one simulation. A budget is the same for all requests of a program."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[Key, _Account] = {}
        self._of: dict[str, _Account] = {}
        """By request; those that have ended give their ids to others, and are in here only."""
        self._cancelled: dict[Key, float] = {}

    def refuses(self, request: Request) -> bool:
        """The program of ``request`` has nothing left to generate, or was cancelled a moment ago."""
        key = key_of(request)
        if key in self._cancelled and self._clock() - self._cancelled[key] < CANCELLED_SECONDS:
            return True
        account = self._accounts.get(key_of(request) or ("", ""))
        return (
            account is not None and not account.ended and account.budget is not None and account.spent >= account.budget
        )

    def arrived(self, request: Request) -> None:
        key, named = key_of(request), request.program
        if key is not None and named is not None:
            account = self._accounts.get(key)
            if account is None or account.ended:
                account = self._accounts[key] = _Account(key, named.budget)
            self._of[request.rid] = account
            account.ended |= named.end
            account.rids[request.rid] = None

    def took(self, request: Request, n: int) -> None:
        """``n`` tokens were sent."""
        key, account = key_of(request), self._of.get(request.rid)
        if account is not None:
            account.spent += n
            within = account.budget is None or account.spent <= account.budget
            require(within, "I16 budget", "{} generated {} of {}", key, account.spent, account.budget)

    def finished(self, request: Request, message: str) -> bool:
        """``request`` ended; whether the budget is why."""
        key, account = key_of(request), self._of.pop(request.rid, None)
        if key is None or account is None:
            return False
        del account.rids[request.rid]
        if account.ended and not account.rids and self._accounts.get(key) is account:
            del self._accounts[key]
        cut = message == OVER_BUDGET.message
        require(not cut or account.spent == account.budget, "I16 budget", "{} was cut at {}", key, account.spent)
        return cut

    def closed(self, key: Key, cancelled: bool) -> list[str]:
        """The program ``key`` gets no more requests; the ids of those that a cancel ends."""
        if cancelled:
            self._cancelled[key] = self._clock()
            members = [rid for rid, account in self._of.items() if account.key == key]
        else:
            members = []
        account = self._accounts.get(key)
        if account is not None:
            account.ended = True
            if not account.rids:
                del self._accounts[key]
        return members

    def knows(self, key: Key, cancelled: bool) -> bool:
        return key in self._accounts or (cancelled and any(account.key == key for account in self._of.values()))


class Ledger:
    """Checks the scheduler's programs and the cache's claims against what they are made of."""

    def __init__(self, scheduler: Scheduler, kv: KVManager, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._clock = clock
        self._since: dict[int, float] = {}
        """Clock reading from which on each program waits."""
        self._tree, self._policy = kv.claims._tree, kv.claims._policy
        self._watch_admissions()

    def step(self) -> None:
        """Everything that holds between two steps."""
        self._members()
        self._seats()
        if self._tree is not None and self._policy is not None:
            self._owners(self._tree, self._policy)
            self._leases(self._tree, self._policy)

    def _members(self) -> None:
        scheduler, programs = self._scheduler, self._scheduler._programs
        name = "I17 programs"
        found: dict[int, list[str]] = {}
        for rid, req in scheduler._reqs.items():
            if (key := key_of(req.request)) is not None:
                state = req.program
                require(state is not None and state.key == key, name, "{} belongs to another program", rid)
                own = state is programs.find(*key) or (state is not None and state.ended and state in programs.states())
                require(own, name, "{} belongs to no program", rid)
                found.setdefault(state.number if state is not None else 0, []).append(rid)
        idle = set(programs._idle)
        for state in programs.states():
            require(list(state.reqs) == found.pop(state.number, []), name, "requests of {}", state.key)
            require(bool(state.reqs) or not state.ended, name, "{} is over and remembered", state.key)
            away = state.key in idle and programs.find(*state.key) is state
            require(away == (not state.reqs), name, "{} is idle or not", state.key)
        require(not found, name, "unknown programs {}", list(found))
        rows = sum(req is not None and not req.background for req in scheduler._rows.reqs)
        require(programs.rows == rows, name, "{} rows of {}", programs.rows, rows)

    def _seats(self) -> None:
        programs, name = self._scheduler._programs, "I18 seats"
        seated = {state.number: state for state in programs.states() if state.seated}
        needs = {number: int(GROWTH * state.held) for number, state in seated.items()}
        require(programs._seated == needs, name, "{} sit, {} are noted", needs, programs._seated)
        require(programs._needed == sum(needs.values()), name, "the seats' needs do not add up")
        for state in seated.values():
            holds = bool(state.reqs) or self._clock() - TICKS < state.leaves < float("inf")
            require(holds, name, "{} is away and keeps its seat until {}", state.key, state.leaves)
        if self._policy is not None:
            favoured = self._policy._favoured
            require(favoured == set(seated), name, "{} sit, {} are favoured", sorted(seated), sorted(favoured))

    def _owners(self, tree: RadixTree, policy: ProgramEviction) -> None:
        tokens: dict[int, int] = {}
        for node in nodes(tree):
            if node.owner > NOBODY:
                tokens[node.owner] = tokens.get(node.owner, 0) + node.n_tokens
        require(tokens == policy._tokens, "I19 owners", "{} are owned, {} are noted", tokens, policy._tokens)
        known = {state.number for state in self._scheduler._programs.states()}
        require(policy._over == set(tokens) - known, "I19 owners", "not exactly what has ended is over")

    def _leases(self, tree: RadixTree, policy: ProgramEviction) -> None:
        claims, name = self._kv.claims, "I20 leases"
        held: dict[Node, int] = {}
        for last, ends in claims._ends.items():
            require(ends > self._clock() - TICKS, name, "a lease until {} is still there", ends)
            node: Node | None = last
            while node is not None and node.parent is not None:
                held[node] = held.get(node, 0) + 1
                node = node.parent
        leased: dict[str, int] = {}
        for node in nodes(tree):
            require(node.leases == held.get(node, 0), name, "{} leases of a node are wrong", node.leases)
            if node.leases:
                leased[node.ns.tenant] = leased.get(node.ns.tenant, 0) + node.n_tokens
        require(leased == policy.leased, name, "{} tokens are leased, {} are noted", leased, policy.leased)
        require(sum(leased.values()) <= LEASE_SHARE * self._kv.capacity, name, "{} tokens are leased", leased)

    # -- who is admitted

    def _watch_admissions(self) -> None:
        queue = self._scheduler._queue
        take, push = queue.take, queue.push
        policy, programs = queue._policy, self._scheduler._programs

        def watched(req: Req) -> None:
            if isinstance(policy, ProgramPolicy) and req not in self._scheduler._planner.suspects:
                self._admitted(req)
            take(req)
            if req.program is not None:
                self._since[req.program.number] = programs.now

        def watched_push(req: Req) -> None:
            state = req.program
            if state is not None and not any(other.program is state for other in queue.reqs()):
                self._since[state.number] = programs.now
            push(req)

        queue.take, queue.push = watched, watched_push  # type: ignore[method-assign]

    def _turn(self, req: Req, waiting: list[Req]) -> bool:
        """Whether it is the turn of the program of ``req``; nobody goes before whoever has one, or is due one."""
        programs, name = self._scheduler._programs, "I21 turns"
        there = {o.program.number: o.program for o in waiting if o.program is not None}
        turn = programs.turn
        if turn is not None:
            require(programs.now < programs._turn_ends, name, "the turn of {} has no end", turn.key)
        elif there and programs.service >= programs._next_turn:
            longest = min(there, key=lambda number: (self._since[number], number))
            overdue = programs.now - self._since[longest] > programs.max_wait
            require(not overdue, name, "{} went before {}", req.request.rid, there[longest].key)
        if turn is None or turn.number not in there:
            return False
        if not programs.turn_is_up:
            state = req.program
            own = state is None or state is turn or state.seated or fork_of(req) == programs.fork
            require(own, name, "{} sat down before {}", req.request.rid, turn.key)
            return False
        require(req.program is turn, name, "{} went before {}", req.request.rid, turn.key)
        return True

    def _admitted(self, req: Req) -> None:
        programs, queue = self._scheduler._programs, self._scheduler._queue
        waiting = queue.reqs()
        oldest = min((o.order for o in waiting if o.program is None), default=-1)
        if req.order == oldest:
            return  # whose turn it may be by its age alone
        if self._turn(req, waiting):
            return
        siblings = [o for o in waiting if o.program is not None and fork_of(o) == programs.fork]
        require(not siblings or req in siblings, "I21 forks", "{} came between siblings", req.request.rid)
        if siblings:
            return
        state = req.program
        if state is not None and not state.seated and programs.rows and programs._seated:
            own, costs = int(GROWTH * state.held), programs.costs
            lost = own + sum(_needed(s) for s in programs.states() if s.seated) - self._kv.capacity
            won = costs.answer * costs.step_seconds / (programs.rows + 1)
            pays = 0.0 < min(lost, own) * costs.token_seconds <= won
            require(lost <= 0 or pays, "I21 seats", "{} entered and there is no room", req.request.rid)


def _needed(state: ProgramState) -> int:
    """Tokens that a seat is taken to need, at least those of the latest prompt and of what is being generated."""
    return max(int(GROWTH * state.held), state.held + sum(req.n_sent for req in state.reqs.values() if req.row >= 0))
