"""Leases: one for each node, within their budget, and each tenant's share of it whatever the others ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bough.base.messages import Namespace
from bough.base.plan import Ints
from bough.base.program import Lease
from bough.kv import claims as claims_module
from bough.kv.claims import Claims
from bough.kv.manager import KVManager
from bough.kv.node import Node
from tests.sim.planted import Bug, planted
from tests.sim.planted.mechanism import simple

PAGE, CELLS = 2, 400
BUDGET = 120


class Ask(NamedTuple):
    """``tenant`` asks for ``ttl`` seconds for ``tail`` behind a stem of ``stem`` tokens; ``later`` it will be then."""

    tenant: str
    stem: int
    tail: int
    ttl: float
    later: float


ASKS = st.lists(
    st.builds(
        Ask,
        st.sampled_from(["", "a", "b"]),
        st.sampled_from([0, 6, 16, 50]),
        st.integers(0, 60),
        st.sampled_from([1.0, 30.0, 3600.0]),
        st.sampled_from([0.0, 0.5, 10.0]),
    ),
    max_size=30,
)


def manager(n_tokens: int = CELLS) -> KVManager:
    return KVManager(n_tokens, PAGE, n_rows=2, max_len=n_tokens, eviction="program")


def cached(kv: KVManager, tenant: str, prompt: Sequence[int]) -> tuple[Namespace, Ints]:
    """The prompt, which a row has just computed."""
    ns, ids = Namespace(tenant=tenant), np.array(prompt, dtype=np.int32)
    admission = kv.admit(ns, ids, len(ids))
    assert admission is not None and kv.grow(admission.row, len(ids) - admission.cached_len) is not None
    kv.release(admission.row, ids, len(ids))
    return ns, ids


def check_books(claims: Claims, now: float) -> None:
    """What is leased is just what the leases say."""
    assert claims._policy is not None
    leased: dict[str, dict[Node, int]] = {}
    for last, ends in claims._ends.items():
        assert ends > now
        node: Node | None = last
        while node is not None and node.parent is not None:
            leased.setdefault(node.ns.tenant, {})[node] = node.n_tokens
            node = node.parent
    sums = {tenant: sum(of.values()) for tenant, of in leased.items()}
    assert {tenant: n for tenant, n in sums.items() if n} == claims._policy.leased
    assert claims.leased_tokens <= BUDGET and {node for _, node in claims._shares} == claims._ends.keys()


def fair(asks: list[Ask]) -> None:
    kv, now = manager(), 0.0
    claims = kv.claims
    assert claims._policy is not None
    for ask in asks:
        now += ask.later
        live = {node: ends for node, ends in claims._ends.items() if ends > now}
        claims.tick(now)
        assert claims._ends == live
        ns, ids = cached(kv, ask.tenant, [*range(ask.stem), *(100 + ask.tail for _ in range(ask.tail))] or [1])
        leased = claims._policy.leased
        before = dict(leased)
        share = BUDGET // len({*before, ask.tenant}) // PAGE * PAGE
        renewed = dict(claims._ends)
        answer, tokens, seconds = claims.lease(ns, ids, Lease(ttl=ask.ttl), now)
        check_books(claims, now)
        for other in before.keys() - {ask.tenant}:
            assert leased.get(other, 0) >= min(before[other], share), "a share was taken"
        whole = len(ids) // PAGE * PAGE
        assert tokens == whole or answer == ("clipped" if tokens else "denied")
        if tokens < whole:
            assert leased.get(ask.tenant, 0) >= share - PAGE or not whole, "denied below its share"
            assert claims.leased_tokens == BUDGET or leased[ask.tenant] >= share
        if tokens:
            (node,) = [node for node in claims._ends if node.ns == ns and kept(kv, node, ids, tokens)]
            assert claims._ends[node] == max(now + seconds, renewed.get(node, 0.0)), "the later end wins"


def kept(kv: KVManager, node: Node, ids: Ints, tokens: int) -> bool:
    """Whether ``node`` ends with just the first ``tokens`` of ``ids``."""
    tree = kv.claims._tree
    assert tree is not None
    return node.end == tokens and tree.match(node.ns, ids[:tokens]).node is node


@settings(deadline=None)
@given(ASKS)
def test_leases_are_shared(asks: list[Ask]) -> None:
    fair(asks)


BUGS = (
    simple(
        "all_is_taken", "who asked last had it all", Claims, "_room", "min(missing, leased[most] - share)", "missing"
    ),
    simple(
        "more_than_enough_is_taken",
        "a token for one tenant ended all leases of another",
        Claims,
        "_take_back",
        "if alone > n:",
        "if False:",
    ),
    simple(
        "nothing_is_taken_back",
        "one tenant denied all others their leases for an hour",
        Claims,
        "_room",
        "max(self._budget - self.leased_tokens, share - leased.get(tenant, 0))",
        "self._budget - self.leased_tokens",
    ),
    simple(
        "renewal_is_not_looked_at", "a renewed lease ran out with the first", Claims, "tick", "if ends > now:", "if 0:"
    ),
    simple("renewal_shortens", "a short lease ended a long one", Claims, "_keep", "if ends > self", "if True or self"),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_caught(bug: Bug) -> None:
    test = settings(deadline=None, database=None, max_examples=300, phases=[Phase.generate])(given(ASKS)(fair))
    with planted(bug), pytest.raises((AssertionError, ValueError, KeyError)):
        test()


def test_equal_prompts_are_one_lease() -> None:
    kv = manager()
    ns, ids = cached(kv, "b", range(40))
    answers = {kv.claims.lease(ns, ids, Lease(ttl=3600.0), k / 100) for k in range(10_000)}
    assert answers == {("granted", 40, 3600.0)}
    assert len(kv.claims._ends) == 1 and len(kv.claims._due) == 1
    kv.claims.tick(99.99 + 3600)
    assert not kv.claims.leased_tokens and not kv.claims._due


def test_a_growing_prompt_is_one_lease() -> None:
    kv = manager()
    for length in range(10, 60, 10):
        kv.claims.lease(*cached(kv, "a", range(length)), Lease(ttl=300.0), length)
    assert [node.end for node in kv.claims._ends] == [50]


def test_one_tenants_many_leases_end_no_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "LEASES", 10)
    kv = manager()
    ns, ids = cached(kv, "a", range(20))
    assert kv.claims.lease(ns, ids, Lease(ttl=300.0), 0.0)[0] == "granted"
    for k in range(30):
        answer = kv.claims.lease(*cached(kv, "b", [200 + k] * 2), Lease(ttl=3600.0), 1.0)
        assert answer == ("granted", 2, 3600.0)
        check_books(kv.claims, 1.0)
    assert len(kv.claims._ends) == 10 and len(kv.claims._due) <= 20
    assert any(node.ns.tenant == "a" for node in kv.claims._ends)
