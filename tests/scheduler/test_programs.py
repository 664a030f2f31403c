"""Programs in the scheduler: forks, seats, budgets, ends and aborts, and that leases keep what they grant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from bough.base.errors import NotFound
from bough.base.messages import Control, Namespace, Prefetch, Request
from bough.base.program import Grant, Lease, Program
from bough.scheduler import programs as ledger
from bough.scheduler.programs import CANCELLED_SECONDS, TURN_SECONDS
from bough.sim.clocked import Cost
from tests.sim.planted import planted
from tests.sim.planted.mechanism import simple

from .world import World, request


def world(cells: int = 4096, **options: Any) -> World:
    return World(cells=cells, policy="program", eviction="program", **options)


def call(rid: str, prompt: list[int], lease: Lease | None = None, tokens: int = 4, **program: Any) -> Request:
    made = request(rid, prompt, max_tokens=tokens, ignore_eos=True)
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return Request(**{**fields, "program": Program(**program) if program else None, "lease": lease})


def grant(w: World, rid: str) -> Grant:
    finish = w.readers[rid].finish
    assert finish is not None and finish.grant is not None
    return finish.grant


def test_a_fork_computes_its_prefix_once_and_is_admitted_together() -> None:
    w = world(step_tokens=64)
    prefix = [1 + i % 90 for i in range(40)]
    w.submit(*(call(f"f{i}", prefix + [i + 1], id="p", fork="best", width=8, tokens=6) for i in range(8)))
    w.step()
    assert len(w.scheduler._rows) == 8, "siblings enter in one step"
    assert w.device.computed_tokens == 40 + 8, "the prefix once, and each sibling's own token"
    locked = w.kv.usage().locked
    assert locked == 40 + 8
    w.run()
    assert sum(reader.n_cached for reader in w.readers.values()) == 7 * 40


@pytest.mark.parametrize(("fork", "order"), [("", [*"pspspspsp", *"p" * 7]), ("wide", [*"p" * 12, *"s" * 4])])
def test_programs_and_requests_of_none_are_admitted_by_turns(fork: str, order: list[str]) -> None:
    """Neither waits for the other's queue to be empty, be the program seated; nobody comes between siblings."""
    w = world(max_running=1)
    named = {"fork": fork, "width": 12} if fork else {}
    w.submit(*(call(f"p{i}", [1, 2, i + 3], id="p", **named) for i in range(12)))
    w.step()
    w.submit(*(call(f"s{i}", [50 + i, 3]) for i in range(4)))
    ended: list[str] = []
    while len(ended) < 16:
        w.step()
        ended += [rid for rid, reader in w.readers.items() if reader.finish is not None and rid not in ended]
    assert [rid[0] for rid in ended] == order


def test_programs_beyond_the_pool_wait_until_a_seat_is_free() -> None:
    w = world(cells=256, step_tokens=256)
    w.submit(*(call(f"{name}0", [k + 1] * 100, id=name, pause=0.0, tokens=20) for k, name in enumerate("abc")))
    for _ in range(10):
        w.step()
    assert [state.key[1] for state in w.scheduler._programs.states() if state.seated] == ["a"]
    assert len(w.scheduler._rows) == 1 and len(w.scheduler._queue) == 2
    w.run()
    assert all(reader.finish is not None for reader in w.readers.values())


def test_programs_that_are_over_leave_nothing_behind() -> None:
    """Under no policy does anything of them stay."""
    for policy in ("lpm", "program"):
        w = World(cells=4096, policy=policy)
        for i in range(3):
            w.submit(call(f"r{i}", [1 + i] * 8, id=f"p{i}", end=True, deadline=1.0))
            w.run()
        w.now += 2.0
        w.scheduler.step()
        programs = w.scheduler._programs
        assert not len(programs) and not programs._moved.keys() - {2}, policy


def test_a_budget_holds_over_all_requests_of_a_program() -> None:
    w = world()
    w.submit(*(call(f"r{i}", [i + 1, 2, 3], id="p", budget=10, tokens=50) for i in range(3)))
    w.run()
    assert sum(len(reader.tokens) for reader in w.readers.values()) == 10
    assert {reader.finish.kind for reader in w.readers.values() if reader.finish} == {"length"}
    assert grant(w, "r0").budget == 0
    w.submit(call("late", [5, 6], id="p"))
    finish = w.readers["late"].finish
    assert finish is not None and (finish.status, finish.param) == (400, "program.budget")


def test_a_program_is_aborted_as_one_unit_and_no_other_tenants() -> None:
    w = world(max_running=2)
    w.submit(*(call(f"r{i}", [i + 1, 2, 3], id="p", tokens=50) for i in range(4)), call("other", [9, 9], id="q"))
    w.step()
    with pytest.raises(NotFound):
        w.scheduler.receive(Control(1, "cancel_program", {"tenant": "somebody", "program": "p"}))
    w.drain()
    assert not any(reader.finish for reader in w.readers.values())
    w.scheduler.receive(Control(2, "cancel_program", {"tenant": "", "program": "p"}))
    w.drain()
    kinds = {rid: reader.finish.kind if reader.finish else None for rid, reader in w.readers.items()}
    assert kinds == {**{f"r{i}": "abort" for i in range(4)}, "other": None}
    w.run()
    assert len(w.scheduler._programs) == 1


def test_what_an_ended_program_leaves_goes_first() -> None:
    w = world(cells=200, step_tokens=256)
    w.submit(request("kept", [1] * 60, max_tokens=1, ignore_eos=True))
    w.run()
    w.submit(call("gone", [2] * 60, id="gone", end=True))
    w.run()
    w.submit(request("new", [3] * 120, max_tokens=2, ignore_eos=True))
    w.run()
    kept, gone = request("x", [1] * 60), request("x", [2] * 60)
    assert w.kv.match_len(kept.namespace, kept.prompt, 60) == 60
    assert w.kv.match_len(gone.namespace, gone.prompt, 60) < 60, "the least recently used would have gone instead"


def test_a_seated_programs_cache_outlives_what_was_used_later() -> None:
    w = world(cells=200, step_tokens=256)
    w.submit(call("seated", [1] * 60, id="p", pause=5.0))
    w.run()
    w.submit(request("later", [2] * 60, max_tokens=1, ignore_eos=True))
    w.run()
    w.submit(request("new", [3] * 120, max_tokens=2, ignore_eos=True))
    w.run()
    seated = request("x", [1] * 60)
    assert w.kv.match_len(seated.namespace, seated.prompt, 60) == 60
    w.now += 100.0
    w.submit(request("newer", [4] * 130, max_tokens=2, ignore_eos=True))
    w.run()
    assert w.kv.match_len(seated.namespace, seated.prompt, 60) < 60, "who stays away too long loses the seat"


def test_nothing_follows_a_spent_request() -> None:
    w = world(cells=200, step_tokens=256)
    w.submit(call("kept", [1] * 60, id="p", pause=0.0))
    w.run()
    w.submit(call("judge", [2] * 60, id="p", next_uses=0))
    w.run()
    w.submit(request("new", [3] * 120, max_tokens=2, ignore_eos=True))
    w.run()
    kept = request("x", [1] * 60)
    assert w.kv.match_len(kept.namespace, kept.prompt, 60) == 60


@pytest.mark.parametrize(
    ("length", "ttl", "answer"), [(50, 60.0, "granted"), (90, 60.0, "clipped"), (50, 1e6, "clipped")]
)
def test_a_lease_is_granted_within_its_budget_and_ends(length: int, ttl: float, answer: str) -> None:
    w = world(cells=200, step_tokens=256)
    w.submit(call("leased", [1] * length, lease=Lease(ttl=ttl), tokens=1))
    w.run()
    granted = grant(w, "leased")
    assert granted.lease == answer
    assert granted.lease_tokens == min(length, 60) and granted.lease_seconds == min(ttl, 3600.0)
    for i in range(4):
        w.submit(request(f"new{i}", [i + 2] * 130, max_tokens=1, ignore_eos=True))
        w.run()
    leased = request("x", [1] * length)
    assert w.kv.match_len(leased.namespace, leased.prompt, length) >= granted.lease_tokens
    w.now += granted.lease_seconds
    w.submit(request("after", [9] * 199, max_tokens=1, ignore_eos=True))
    w.run()
    assert w.kv.match_len(leased.namespace, leased.prompt, length) <= 1 and not w.kv.claims.leased_tokens


def test_without_the_policy_a_lease_is_denied() -> None:
    w = World(cells=200)
    w.submit(call("leased", [1] * 20, lease=Lease(ttl=9.0)))
    w.run()
    assert grant(w, "leased").lease == "denied"


def test_a_program_that_is_passed_over_goes_first_in_the_end() -> None:
    w = world(cells=256, step_tokens=256)
    w.submit(call("old", [90] * 200, id="old", tokens=20))
    w.run()
    w.submit(call("old2", [90] * 200 + [1], id="old", priority=-5, tokens=4))
    ended = 0
    while w.readers["old2"].finish is None:
        for k in range(2):
            w.submit(call(f"n{ended}-{k}", [1 + ended % 80] * 100, id=f"n{ended}-{k}", priority=5, end=True))
        ended += 1
        w.step()
        assert ended < 2000, "starved"


def test_a_turn_ends_by_the_clock() -> None:
    """A program that goes on for ever does not keep its turn from the next that waits."""
    w = world(max_running=1, max_wait=0.5)
    programs = w.scheduler._programs
    w.submit(call("now", [5] * 50, id="now", tokens=200))
    w.step()
    w.submit(call("long", [1] * 20, id="long", tokens=400), call("next", [2] * 20, id="next", tokens=4))
    w.now += 1.0
    while w.readers["now"].finish is None:
        w.step()
    w.step()
    assert programs.turn is not None and programs.turn.key[1] == "long"
    w.now += TURN_SECONDS
    w.step()
    assert programs.turn is None
    w.run()
    assert w.readers["next"].finish is not None


def test_what_a_program_asks_for_moves_its_own_tenants_programs_only() -> None:
    w = world(cells=1024, max_running=1)

    def ask(name: str, tenant: str, **said: Any) -> Request:
        return structs.replace(call(name, [5] * 50, id=name, **said), namespace=Namespace(tenant=tenant))

    w.submit(ask("now", "a"))
    w.step()
    w.submit(ask("first", "a"), ask("second", "b"), ask("third", "b", priority=1 << 20, deadline=0.001))
    order: list[str] = []
    while not w.scheduler.idle:
        w.step()
        order += [rid for rid, reader in w.readers.items() if reader.finish and rid not in order]
    assert order == ["now", "first", "third", "second"]


def test_a_budget_that_is_named_late_counts_what_was_before() -> None:
    w = world()
    w.submit(call("r0", [1, 2, 3], id="p", tokens=10))
    w.run()
    w.submit(call("r1", [1, 2, 4], id="p", tokens=10, budget=15))
    w.run()
    assert len(w.readers["r1"].tokens) == 5 and grant(w, "r1").budget == 0
    w.submit(call("r2", [1, 2, 5], id="q", tokens=10))
    w.run()
    w.submit(call("r3", [1, 2, 6], id="q", budget=10))
    finish = w.readers["r3"].finish
    assert finish is not None and (finish.status, finish.param) == (400, "program.budget")


def test_a_sibling_that_comes_after_the_cancel_is_refused() -> None:
    w = world()
    w.submit(call("r0", [1, 2, 3], id="p", tokens=50))
    w.step()
    w.scheduler.receive(Control(1, "cancel_program", {"tenant": "", "program": "p"}))
    w.submit(call("r1", [1, 2, 4], id="p"))
    finish = w.readers["r1"].finish
    assert finish is not None and (finish.status, finish.param) == (400, "program.id")
    w.now += CANCELLED_SECONDS
    w.submit(call("r2", [1, 2, 4], id="p"))
    w.run()
    assert len(w.readers["r2"].tokens) == 4, "by then it is another program"


def test_nobody_sits_down_where_a_long_answer_has_grown() -> None:
    w = world(cells=256)
    w.submit(call("long", [1] * 20, tokens=230, id="long"))
    while len(w.readers["long"].tokens) < 160:
        w.step()
    w.submit(call("other", [2] * 60, id="other"))
    programs = w.scheduler._programs
    other = programs.known("", "other")
    assert not programs.has_room(other)
    no_room = "max(0, n - self._seated[number])"
    with planted(simple("no_room", "a program lost its prefix to an answer", ledger.Programs, "_grown", no_room, "0")):
        assert programs.has_room(other)
    w.run()
    assert len(w.readers["other"].tokens) == 4


@pytest.mark.parametrize("declared", [False, True])
def test_who_says_that_little_is_left_goes_first(declared: bool) -> None:
    """Without a word, a program whose calls cost much is taken to want much."""
    w = world(cells=256, max_running=1)

    def ask(name: str, turn: int, to_come: int) -> Request:
        said = {"next_uses": to_come} if declared else {}
        prompt = [ord(name) - 90] * 20 + [turn + 10] * (100 if name == "a" else 20)
        return call(f"{name}{turn}", prompt, id=name, pause=0.0, **said)

    for turn in range(8):
        w.submit(ask("a", turn, 8 - turn))
        w.run()
    w.submit(ask("b", 0, 60))
    w.run()
    w.submit(call("now", [5] * 50, tokens=30))
    w.step()
    w.submit(ask("b", 1, 59), ask("a", 8, 0))
    while not any(w.readers[rid].finish for rid in ("a8", "b1")):
        w.step()
    assert (w.readers["a8"].finish is not None) == declared
    w.run()


def test_one_seat_more_is_taken_where_it_saves_more_than_it_costs() -> None:
    """Of two programs that do not fit together the second sits down beside the first as the steps of its answer would
    cost more than computing its prompt anew, and does not where the prompt costs more."""
    for cost, seated in ((Cost(step=1.0, token=1e-4, row=0.0), 2), (Cost(step=1e-3, token=1.0, row=0.0), 1)):
        w = world(cells=256, step_tokens=256, cost=cost)
        w.submit(call("before", [9] * 100, id="before", tokens=8, end=True))
        w.run()
        w.submit(*(call(f"{name}0", [k + 1] * 100, id=name, pause=0.0, tokens=20) for k, name in enumerate("ab")))
        for _ in range(4):
            w.step()
        assert w.scheduler._programs.seated == seated
        w.run()
        assert all(reader.finish is not None for reader in w.readers.values())


def ahead(w: World, name: str, prompt: list[int], tenant: str = "") -> None:
    """What the program ``name`` is told to append to ``prompt`` is computed."""
    ids = np.array(prompt, dtype="<i4").tobytes()
    w.scheduler.receive(Prefetch(ids, Namespace(tenant=tenant), name))
    w.run()


def test_whoever_arrives_waits_for_one_short_step_of_what_is_computed_ahead() -> None:
    """Alone on the device it computes a few decode steps' worth at a time, and queues nothing behind that."""
    cost = Cost(step=0.005, token=0.001, row=0.001)
    w = world(step_tokens=512, depth=1, cost=cost)
    w.submit(call("p", [1] * 100, tokens=1, id="p"))
    w.run()
    ids = np.array([1] * 100 + w.readers["p"].tokens + [5] * 200, dtype="<i4").tobytes()
    w.scheduler.receive(Prefetch(ids, Namespace(), "p"))
    taken = []
    while not w.scheduler.idle:
        before, flying = w.device.computed_tokens, len(w.scheduler._in_flight)
        w.step()
        taken.append(w.device.computed_tokens - before)
        assert not (flying and taken[-1])
    assert sum(taken) >= 200 and 16 <= max(taken) <= 20


def test_what_was_computed_ahead_is_found_by_what_stands_before_it() -> None:
    w = world(cells=8192, step_tokens=512)
    for name, first in (("p", 1), ("q", 2)):
        w.submit(call(name, [first] * 100, tokens=1, id=name))
        w.run()
        ahead(w, name, [first] * 100 + w.readers["p"].tokens + [5] * 50)
    programs = w.scheduler._programs
    ((record,),) = (state.ahead for state in programs.states() if state.key[1] == "p")
    assert len(record) <= 51, "the prompt is not kept again"
    for name, first, used in (("q", 1, 0), ("p", 1, 31)):
        before, answer = programs._used, w.readers["p"].tokens
        w.submit(call(f"{name}1", [first] * 100 + answer + [5] * 30 + [7] * 9, tokens=1, id=name))
        w.run()
        assert abs(programs._used - before - used) <= 1, name


def test_what_is_kept_of_what_was_computed_ahead_is_bounded_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "AHEAD_TOKENS", 2000)
    w = world(cells=8192, step_tokens=512)
    programs = w.scheduler._programs

    def follow(name: str, tenant: str) -> None:
        made = call(name, [len(name)] * 20, tokens=1, id=name)
        w.submit(structs.replace(made, namespace=Namespace(tenant=tenant)))
        w.run()
        ahead(w, name, [len(name)] * 20 + [90, len(name)] * 60, tenant)

    follow("a", "small")
    for i in range(1, 20):
        follow("b" * i, "large")
        assert programs._ahead.size <= 2000
    kept = {state.key: len(state.ahead) for state in programs.states()}
    assert kept["small", "a"] == 1, "whoever has most loses the oldest"
    assert 0 < sum(kept.values()) < 10 and kept["large", "b" * 19] == 1
    for state in programs.states():
        programs.close(state)
    assert programs._ahead.size == 0


def test_a_request_of_an_ended_program_begins_a_new_one() -> None:
    """While requests of the old one run on, which a cancel still finds."""
    w = world()
    w.submit(call("old", [1, 2, 3], tokens=50, id="p", budget=50))
    for _ in range(5):
        w.step()
    w.scheduler.receive(Control(1, "end_program", {"tenant": "", "program": "p"}))
    w.submit(call("new", [1, 2, 4], tokens=8, id="p", budget=8))
    w.run()
    assert len(w.readers["new"].tokens) == 8 and len(w.readers["old"].tokens) == 50
    assert (grant(w, "new").generated, grant(w, "new").budget) == (8, 0)
    stats = w.scheduler.stats().programs
    assert (stats.opened, stats.ended, stats.known, stats.forgotten) == (2, 1, 1, 0)
    assert len(stats.completions) == 1

    w.scheduler._programs.close(w.scheduler._programs.known("", "p"))
    w.submit(call("one", [1, 2, 3], tokens=50, id="p", end=True), call("two", [1, 5], tokens=50, id="p", end=True))
    w.submit(call("three", [7, 5], tokens=50, id="p"))
    w.step()
    w.scheduler.receive(Control(2, "cancel_program", {"tenant": "", "program": "p"}))
    w.drain()
    finishes = [w.readers[rid].finish for rid in ("one", "two", "three")]
    assert [finish.kind for finish in finishes if finish is not None] == ["abort"] * 3
    w.run()
    assert not len(w.scheduler._programs) and not w.scheduler._programs._needed


@pytest.mark.parametrize(("budget", "generated"), [(30, 30), (5, 500)])
def test_a_late_budget_binds_what_runs(budget: int, generated: int) -> None:
    """One that is used up already is refused with the request that names it."""
    w = world(depth=1)
    w.submit(call("old", [1, 2, 3], tokens=500, id="p"))
    while len(w.readers["old"].tokens) < 20:
        w.step()
    w.submit(call("new", [1, 2, 4], tokens=8, id="p", budget=budget))
    w.run()
    assert sum(len(reader.tokens) for reader in w.readers.values()) == generated
    new = w.readers["new"].finish
    assert new is not None and new.kind == ("error" if generated == 500 else "length")


def test_a_deadline_counts_until_it_has_passed() -> None:
    w = world(max_running=1, cost=Cost(1.0, 0.0, 0.0))
    w.submit(call("running", [1, 2, 3], id="r", tokens=8))
    w.step()
    w.submit(call("missed", [4, 5], id="m", deadline=0.02), call("later", [6, 7], id="l", deadline=100.0))
    w.submit(call("renewed", [8, 9], id="n", deadline=200.0), call("urgent", [8, 9, 9], id="n", deadline=50.0))
    w.now += 0.05
    ended: list[str] = []
    while not w.scheduler.idle:
        w.step()
        ended += [rid for rid, reader in w.readers.items() if reader.finish is not None and rid not in ended]
    assert ended == ["running", "renewed", "urgent", "later", "missed"]
