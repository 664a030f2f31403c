"""Bugs of programs and leases."""

from __future__ import annotations

from bough.kv.claims import Claims
from bough.kv.program_eviction import ProgramEviction
from bough.kv.radix import RadixTree
from bough.scheduler import commit
from bough.scheduler.loop import Scheduler
from bough.scheduler.program_policy import ProgramPolicy
from bough.scheduler.programs import Programs

from .mechanism import simple

PROGRAMS = (
    simple(
        "seat_leaks",
        "programs that had ended went on holding their share of the cache, until nobody could sit down",
        Programs,
        "forget",
        "self.stand(state)",
        "pass",
    ),
    simple(
        "seat_costs_nothing",
        "the sum of what the seated need was not kept, and everybody sat down",
        Programs,
        "_settle",
        "self._needed += need",
        "pass",
    ),
    simple(
        "favour_outlives_the_seat",
        "the cache went on keeping what belonged to programs without a seat",
        Programs,
        "stand",
        "self._claims.favour(state.number, False)",
        "pass",
    ),
    simple(
        "hold_is_never_released",
        "the KV of agents that never came back from their tool was kept for ever",
        Programs,
        "tick",
        "self.stand(state)",
        "pass",
    ),
    simple(
        "ended_program_is_remembered",
        "what an ended program left was not let go, because it might come back",
        Programs,
        "_leave",
        "if state.ended:",
        "if False:",
    ),
    simple(
        "close_forgets_those_that_run",
        "a program was forgotten while its requests ran",
        Programs,
        "close",
        "if not state.reqs:",
        "if True:",
    ),
    simple(
        "cancel_stops_one",
        "only the first request of a cancelled program stopped",
        Scheduler,
        "_end_program",
        "list(state.reqs.values())",
        "list(state.reqs.values())[:1]",
    ),
    simple(
        "programs_of_tenants_meet",
        "two tenants used the same id, and each other's budget",
        Programs,
        "arrive",
        "key = request.namespace.tenant, named.id",
        "key = '', named.id",
    ),
    simple(
        "rows_miscounted",
        "nobody seemed to run no more, and who had no seat waited for ever",
        Programs,
        "vacated",
        "self.rows -= 1",
        "pass",
    ),
    simple(
        "budget_off_by_one",
        "a program generated one token more than its budget",
        commit,
        "stop_reason",
        "if program.spent >= program.budget:",
        "if program.spent > program.budget:",
    ),
    simple(
        "budget_not_checked_on_arrival",
        "a program with nothing left was still taken in, and generated nothing",
        Programs,
        "check",
        "state.spent >= state.budget",
        "state.spent > state.budget",
    ),
    simple(
        "siblings_separated",
        "others came between the branches of a fork, and its prefix was computed again",
        ProgramPolicy,
        "head",
        "self._forks.get(programs.fork)",
        "self._forks.get((0, ''))",
    ),
    simple(
        "lease_never_ends",
        "leases ran out on paper only",
        Claims,
        "tick",
        "(heapq.heappop(self._leases)[2], -1)",
        "(heapq.heappop(self._leases)[2], 0)",
    ),
    simple(
        "lease_counted_twice",
        "two leases on one prefix used the budget up twice",
        ProgramEviction,
        "lease",
        "if above.leases == (1 if by > 0 else 0):",
        "if True:",
    ),
    simple(
        "lease_lost_at_split",
        "a leased node was split and only its lower half stayed leased",
        RadixTree,
        "_split",
        "lower.owner, lower.spent, lower.leases",
        "lower.owner, lower.spent, 0",
    ),
    simple(
        "lease_beyond_its_budget",
        "leases took more of the pool than they may",
        Claims,
        "_lease",
        "ids[:asked]), room)",
        "ids[:asked]), self._budget)",
    ),
    simple(
        "shared_node_keeps_its_owner",
        "what everybody used went with the program that had computed it",
        RadixTree,
        "_use",
        "self._policy.shared(node, before)",
        "pass",
    ),
    simple(
        "ended_owner_is_kept",
        "what an ended program left was evicted last",
        ProgramEviction,
        "over",
        "self._over.add(owner)",
        "pass",
    ),
)
