"""Of what the scheduler remembers of programs each tenant has a share, whatever the others do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import structs

from bough.base.errors import NotFound
from bough.base.messages import Control, Namespace, Prefetch, Request
from bough.base.program import Program
from bough.base.shares import Shares
from bough.scheduler import background as background_module
from bough.scheduler import programs as programs_module
from bough.scheduler.programs import Programs
from tests.sim.planted import Bug, planted
from tests.sim.planted.mechanism import simple

from .world import World, request

BOUND = 6


class Put(NamedTuple):
    tenant: str
    key: int
    size: int
    last: bool
    taken: bool
    """It is taken out again, in the place of put."""


PUTS = st.lists(
    st.builds(Put, st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 5), st.booleans(), st.booleans())
)


def shared(puts: list[Put]) -> None:
    """As a plain list of entries that is sorted anew each time."""
    shares: Shares[int] = Shares()
    twin: list[Put] = []
    for put in puts:
        twin = [entry for entry in twin if entry[:2] != put[:2]]
        if put.taken:
            shares.pop(put.tenant, put.key)
        else:
            shares.put(put.tenant, put.key, put.size, last=put.last)
            twin.append(put)
        while shares.size > 12:
            tenant, key = shares.oldest()
            sizes = {name: sum(e.size for e in twin if e.tenant == name) for name in "abc"}
            assert sizes[tenant] == max(sizes.values()), "another had more"
            own = sorted((e for e in twin if e.tenant == tenant), key=lambda e: e.last)
            assert key == own[0].key
            shares.pop(tenant, key)
            twin.remove(own[0])
        assert shares.size == sum(e.size for e in twin) and len(list(shares)) == len(twin)


@settings(deadline=None)
@given(PUTS)
def test_whoever_has_most_loses_his_oldest(puts: list[Put]) -> None:
    shared(puts)


def call(tenant: str, id: str, budget: int | None = None, n: int = 0) -> Request:
    made = request(f"{tenant}-{id}-{n}", [1, 2, 3], max_tokens=2, ignore_eos=True)
    return structs.replace(made, namespace=Namespace(tenant=tenant), program=Program(id=id, budget=budget))


CALLS = st.lists(st.tuples(st.sampled_from("bc"), st.integers(0, 40), st.booleans()), min_size=20, max_size=40)


def remembered(calls: list[tuple[str, int, bool]]) -> None:
    """Three tenants; ``a`` has one program with a budget and one without, and one that was cancelled."""
    w = World(policy="program", eviction="program")
    programs = w.scheduler._programs
    w.submit(call("a", "plain"), call("a", "budget", 3), call("a", "gone"))
    w.run()
    w.scheduler.receive(Control(1, "cancel_program", {"tenant": "a", "program": "gone"}))
    for k, (tenant, id, budget) in enumerate(calls):
        w.submit(call(tenant, f"p{id}", 1000 if budget else None, k))
        w.run()
        if id % 3 == 0 and programs.find(tenant, f"p{id}") is not None:
            w.scheduler.receive(Control(k + 2, "cancel_program", {"tenant": tenant, "program": f"p{id}"}))
    w.drain()
    assert len(programs) <= BOUND and len(programs._cancelled) == programs._cancels.size <= BOUND
    (info,) = programs.describe("a", "budget")
    assert info.budget == 1 and programs.find("a", "plain") is not None
    w.submit(call("a", "budget", n=1))
    w.run()
    assert len(w.readers["a-budget-1"].tokens) == 1
    w.now = programs.now
    w.submit(call("a", "gone", n=1))
    finish = w.readers["a-gone-1"].finish
    assert finish is not None and finish.param == "program.id"


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_module, "PROGRAMS", BOUND)
    monkeypatch.setattr(programs_module, "CANCELLED_SECONDS", 1e6)


@pytest.mark.usefixtures("bounded")
def test_no_tenant_makes_anothers_programs_be_forgotten() -> None:
    settings(deadline=None, max_examples=20)(given(CALLS)(remembered))()


@pytest.mark.usefixtures("bounded")
def test_programs_with_a_budget_are_forgotten_last() -> None:
    w = World(policy="program", eviction="program")
    w.submit(call("a", "budget", 3))
    w.run()
    for k in range(3 * BOUND):
        w.submit(call("a", f"p{k}"))
        w.run()
    known = [state.key[1] for state in w.scheduler._programs.states()]
    assert known == ["budget", *(f"p{k}" for k in range(2 * BOUND + 1, 3 * BOUND))]


def test_a_flood_takes_nobody_elses_place_among_what_waits_to_be_computed_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_module, "WAITING", BOUND)
    w = World(policy="program", eviction="program", cells=256)
    names = [("a", "mine"), *(("b", f"p{k}") for k in range(3 * BOUND))]
    for tenant, id in names:
        w.submit(call(tenant, id))
        w.run()
    for k, (tenant, _) in enumerate(names):
        ids = np.array([1, 2, 3, k + 4, 5, 6, 7], dtype="<i4").tobytes()
        w.scheduler.receive(Prefetch(ids, Namespace(tenant=tenant), names[k][1]))
    waiting = [req.request for req in w.scheduler._background._waiting.values()]
    assert [r.namespace.tenant for r in waiting] == ["a", *"b" * (BOUND - 1)]
    assert [r.prompt[3] for r in waiting[1:]] == [k + 4 for k in range(len(names))][1 - BOUND :]
    w.run()
    assert not w.scheduler._background and len(w.scheduler._programs.states()[0].ahead) == 1


MOST = "max(self._owned, key=lambda name: self._owned[name].size)"
BUGS = (
    simple("first_tenant_pays", "a flood cost another tenant his budgets", Shares, "oldest", MOST, "min(self._owned)"),
    simple("replaced_counts_on", "renewals filled the book", Shares, "put", "self.pop(tenant, key)", "pass"),
)  # fmt: skip
OLDEST = "next(key for key, state in self._states.items() if not state.reqs)"
FORGOTTEN = (
    simple("oldest_idle", "of all tenants the oldest was forgotten", Programs, "_leave", "self._idle.oldest()", OLDEST),
    simple(
        "oldest_cancel",
        "a flood of cancels took another tenant's back",
        Programs,
        "cancel",
        "self._cancels.oldest()",
        "next(iter(self._cancelled))",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_of_shares_are_caught(bug: Bug) -> None:
    test = settings(deadline=None, database=None, max_examples=300, phases=[Phase.generate])(given(PUTS)(shared))
    with planted(bug), pytest.raises(AssertionError):
        test()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("bug", FORGOTTEN, ids=lambda bug: bug.name)
def test_planted_bugs_of_what_is_remembered_are_caught(bug: Bug) -> None:
    test = settings(deadline=None, database=None, max_examples=100, phases=[Phase.generate])(given(CALLS)(remembered))
    with planted(bug), pytest.raises((AssertionError, LookupError, NotFound)):
        test()
