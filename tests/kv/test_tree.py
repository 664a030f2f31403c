"""The radix tree, and the index of what waits for it, against a plain dict of prefixes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bough.base.messages import Namespace
from bough.kv.eviction import EVICTIONS
from bough.kv.node import to_ints
from bough.kv.radix import RadixTree
from bough.kv.waiting import WaitingIndex

NAMESPACES = (Namespace(), Namespace(salt="a"), Namespace(tenant="a"))
SPACES = st.sampled_from(NAMESPACES)
SEQUENCE = st.lists(st.integers(0, 1), max_size=20)
"""Words of two letters, so that sequences part and meet again at every length."""


def array(values):
    return np.array(values, dtype=np.int32)


class TreeMachine(RuleBasedStateMachine):
    """Every page of the tree is one entry ``(namespace, tokens up to its end) -> locs of the page``."""

    page_size = 1
    eviction = "lru"

    def __init__(self):
        super().__init__()
        self.tree = RadixTree(self.page_size, EVICTIONS.get(self.eviction)())
        self.index = WaitingIndex(self.tree, self.page_size)
        self.tree.observe(self.index)
        self.pages = {}
        self.handles = []
        self.waiting = {}
        self.lengths = {}
        self.counter = 0

    def expand(self, letters):
        """Tokens whose letters span about half a page, so that pages share heads without being equal."""
        return [x for x in letters for _ in range(max(1, self.page_size // 2))]

    def prefix(self, ns, ids):
        n = 0
        while n + self.page_size <= len(ids) and (ns, tuple(ids[: n + self.page_size])) in self.pages:
            n += self.page_size
        return n

    def add(self, ns, ids, start, locs):
        for i in range(start, len(ids), self.page_size):
            self.pages[ns, tuple(ids[: i + self.page_size])] = tuple(locs[i - start : i - start + self.page_size])

    def lose(self, locs):
        """Take the freed locs out of the oracle; they have to be whole pages that it holds, unlocked."""
        freed = locs.reshape(-1, self.page_size).tolist()
        by_locs = {value: key for key, value in self.pages.items()}
        for page in freed:
            ns, ids = by_locs[tuple(page)]
            del self.pages[ns, ids]
            assert not any(h_ns == ns and tuple(h_ids[: len(ids)]) == ids for _, h_ns, h_ids in self.handles)
        for ns, ids in self.pages:
            parent = ids[: -self.page_size]
            assert not parent or (ns, parent) in self.pages, "an inner page was freed before what follows it"

    @rule(ns=SPACES, letters=SEQUENCE)
    def match(self, ns, letters):
        ids = self.expand(letters)
        found = self.tree.match(ns, array(ids))
        assert found.length == self.prefix(ns, ids)

    @rule(ns=SPACES, letters=SEQUENCE)
    def lock(self, ns, letters):
        ids = self.expand(letters)
        found = self.tree.match(ns, array(ids))
        handle = self.tree.lock(found)
        assert handle.length == found.length
        self.handles.append((handle, ns, ids[: found.length]))

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), letters=SEQUENCE)
    def insert(self, data, letters):
        at = data.draw(st.integers(0, len(self.handles) - 1))
        handle, ns, ids = self.handles[at]
        more = self.expand(letters)
        more = more[: len(more) // self.page_size * self.page_size]
        locs = [self.counter * self.page_size + i for i in range(len(more))]
        self.counter += len(more) // self.page_size
        known = self.prefix(ns, ids + more) - len(ids)
        if more:
            assert handle.follows(array(more[: self.page_size])) == (known > 0)
        assert self.tree.insert(handle, array(more), array(locs)) == known
        self.add(ns, ids + more, len(ids) + known, locs[known:])
        self.handles[at] = (handle, ns, ids + more)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def unlock(self, data):
        handle, _, _ = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        self.tree.unlock(handle)

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), share=st.floats(0, 1))
    def discard(self, data, share):
        handle, ns, ids = self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1)))
        keep = int(share * len(ids)) // self.page_size * self.page_size
        gone = tuple(ids[: keep + self.page_size])
        if keep == len(ids):
            assert not len(self.tree.discard(handle, keep))
        elif any(o_ns == ns and tuple(o[: len(gone)]) == gone for _, o_ns, o in self.handles):
            with pytest.raises(RuntimeError):
                self.tree.discard(handle, keep)
        else:
            self.lose(self.tree.discard(handle, keep))
            assert self.prefix(ns, ids) == keep

    @rule(n=st.integers(0, 30))
    def evict(self, n):
        had = self.tree.evictable_tokens
        locs = self.tree.evict(n)
        assert len(locs) == min(had, -(-n // self.page_size) * self.page_size)
        self.lose(locs)

    @rule()
    def flush(self):
        self.lose(self.tree.flush())
        assert self.tree.total_tokens == self.tree.locked_tokens

    @rule(ns=SPACES, letters=SEQUENCE, limit=st.integers(-1, 30))
    def wait(self, ns, letters, limit):
        id = len(self.lengths) + 1000
        ids = self.expand(letters)
        self.index.add(id, ns, array(ids), limit)
        self.waiting[id] = (ns, ids[: max(0, limit)])
        self.lengths[id] = self.prefix(*self.waiting[id])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.index.remove(id)
        del self.waiting[id]
        assert id not in self.index

    @invariant()
    def tree_is_the_dict(self):
        self.tree.check()
        assert self.tree.total_tokens == len(self.pages) * self.page_size
        for handle, ns, ids in self.handles:
            expected = [
                loc
                for i in range(0, len(ids), self.page_size)
                for loc in self.pages[ns, tuple(ids[: i + self.page_size])]
            ]
            assert handle.length == len(ids) and handle.locs().tolist() == expected

    @invariant()
    def everyone_who_waits_knows_the_length(self):
        self.index.check()
        changed = self.index.changed()
        assert len(set(changed)) == len(changed) and set(changed) <= set(self.waiting)
        for id, request in self.waiting.items():
            length = self.prefix(*request)
            assert self.index.length(id) == length
            assert length == self.lengths[id] or id in changed, "a length changed silently"
            self.lengths[id] = length

    @invariant()
    def the_walk_meets_everyone_once(self):
        order = list(self.index.depth_first())
        assert sorted(order) == sorted(self.waiting)
        for n in range(self.page_size, 20, self.page_size):
            # Those that share n cached tokens stand together.
            groups = [
                (ns, tuple(ids[:n])) if self.lengths[id] >= n else None
                for id in order
                for ns, ids in [self.waiting[id]]
            ]
            runs = [g for i, g in enumerate(groups) if g is not None and (i == 0 or groups[i - 1] != g)]
            assert len(runs) == len(set(runs))

    def teardown(self):
        for handle, _, _ in self.handles:
            self.tree.unlock(handle)
        self.handles.clear()
        self.lose(self.tree.flush())
        assert not self.pages and not self.tree.total_tokens


def machine(page_size, eviction, examples):
    case = type("Case", (TreeMachine,), {"page_size": page_size, "eviction": eviction}).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return case


TestTokens = machine(1, "lru", 60)
TestPagesOfFour = machine(4, "arc", 40)
TestPagesOfSixteen = machine(16, "lfu", 20)
TestOldestFirst = machine(1, "fifo", 20)
TestAdaptive = machine(1, "arc", 30)


def put(tree, ids, locs, ns=NAMESPACES[0]):
    """Insert a sequence and leave it unlocked."""
    handle = tree.lock(tree.match(ns, array(ids)))
    start = handle.length
    tree.insert(handle, array(ids[start:]), array(locs[start:]))
    tree.unlock(handle)


def make(page_size=1, eviction="lru"):
    return RadixTree(page_size, EVICTIONS.get(eviction)())


def test_a_prompt_in_chunks_stays_one_node():
    tree = make()
    handle = tree.lock(tree.match(NAMESPACES[0], array([])))
    for start in range(0, 6400, 100):
        more = np.arange(start, start + 100, dtype=np.int32)
        tree.insert(handle, more, more)
    assert handle.node.n_tokens == 6400
    assert handle.node.parent.parent is None
    tree.check()


def test_a_leaf_that_two_handles_lock_does_not_grow():
    tree = make()
    put(tree, [1, 2], [1, 2])
    one, two = (tree.lock(tree.match(NAMESPACES[0], array([1, 2]))) for _ in range(2))
    tree.insert(one, array([3]), array([3]))
    tree.insert(two, array([4]), array([4]))
    assert one.node.parent is two.node.parent and to_ints(two.node.parent.key).tolist() == [1, 2]
    tree.check()


def test_a_handle_on_a_split_node_refers_to_its_lower_part():
    tree = make()
    handle = tree.lock(tree.match(NAMESPACES[0], array([])))
    tree.insert(handle, array([1, 2, 3, 4]), array([1, 2, 3, 4]))
    other = tree.lock(tree.match(NAMESPACES[0], array([1, 2, 9])))
    assert (handle.length, other.length) == (4, 2)
    assert handle.node.parent is other.node and other.node.locks == 2 and handle.node.locks == 1
    assert handle.locs().tolist() == [1, 2, 3, 4]
    tree.check()


def test_a_match_changes_nothing():
    tree = make()
    put(tree, [1, 2, 3], [1, 2, 3])
    node = tree.match(NAMESPACES[0], array([1])).node
    before = node.stamp, node.hits, node.n_tokens
    tree.match(NAMESPACES[0], array([1, 2]))
    tree.match(NAMESPACES[1], array([1, 2]))
    assert (node.stamp, node.hits, node.n_tokens) == before
    tree.check()


def test_a_match_from_before_a_change_of_shape_cannot_be_locked():
    tree = make()
    put(tree, [1, 2, 3], [1, 2, 3])
    found = tree.match(NAMESPACES[0], array([1, 2]))
    tree.evict(3)
    with pytest.raises(RuntimeError):
        tree.lock(found)


def test_a_handle_ends_once():
    tree = make()
    handle = tree.lock(tree.match(NAMESPACES[0], array([1])))
    tree.unlock(handle)
    for again in (lambda: tree.unlock(handle), lambda: tree.insert(handle, array([1]), array([1]))):
        with pytest.raises(RuntimeError):
            again()


def test_parts_of_pages_are_refused():
    tree = make(page_size=4)
    handle = tree.lock(tree.match(NAMESPACES[0], array([])))
    for ids, locs in (([1, 2], [1, 2]), ([1] * 4, [1])):
        with pytest.raises(ValueError):
            tree.insert(handle, array(ids), array(locs))


def test_discard_takes_what_hangs_below_with_it():
    tree = make()
    handle = tree.lock(tree.match(NAMESPACES[0], array([])))
    tree.insert(handle, array([1, 2, 3, 4]), array([1, 2, 3, 4]))
    put(tree, [1, 2, 3, 7], [0, 0, 0, 7])
    assert sorted(tree.discard(handle, 2).tolist()) == [3, 4, 7]
    assert tree.match(NAMESPACES[0], array([1, 2, 3])).length == 2
    tree.check()
