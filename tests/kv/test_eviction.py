"""In which order leaves go."""

from __future__ import annotations

import numpy as np
import pytest

from bough.base.errors import ConfigError
from bough.base.messages import Namespace
from bough.kv.arc import AdaptiveEviction
from bough.kv.eviction import EVICTIONS
from bough.kv.radix import RadixTree

NS = Namespace()


def array(values):
    return np.array(values, dtype=np.int32)


class Tree:
    """A tree of named runs: run k is ten tokens ``100 k + i`` with themselves as locs."""

    def __init__(self, policy, page_size=1):
        self.tree = RadixTree(page_size, policy)

    def use(self, *runs):
        """A request with these runs comes, computes what is missing, and leaves. The tokens found."""
        ids = array([100 * k + i for k in runs for i in range(10)])
        handle = self.tree.lock(self.tree.match(NS, ids))
        found = handle.length
        self.tree.insert(handle, ids[found:], ids[found:])
        self.tree.unlock(handle)
        self.tree.check()
        return found

    def evict(self, n=10):
        """The runs that lost tokens, in order."""
        return list(dict.fromkeys((self.tree.evict(n) // 100).tolist()))

    def holds(self, *runs):
        ids = array([100 * k + i for k in runs for i in range(10)])
        return self.tree.match(NS, ids).length == len(ids)


def make(name):
    return Tree(EVICTIONS.get(name)())


def test_lru_evicts_what_was_used_longest_ago():
    tree = make("lru")
    for k in (1, 2, 3, 1):
        tree.use(k)
    assert [tree.evict() for _ in range(4)] == [[2], [3], [1], []]


def test_lru_counts_the_end_of_a_use():
    tree = make("lru")
    tree.use(1)
    handle = tree.tree.lock(tree.tree.match(NS, array(range(100, 110))))
    tree.use(2)
    tree.tree.unlock(handle)
    assert [tree.evict(), tree.evict()] == [[2], [1]]


def test_lfu_evicts_what_was_found_least_often_then_least_recently():
    tree = make("lfu")
    for k in (1, 1, 1, 2, 3, 3, 4):
        tree.use(k)
    assert [tree.evict() for _ in range(4)] == [[2], [4], [3], [1]]


def test_fifo_evicts_the_oldest_however_often_it_is_used():
    tree = make("fifo")
    for k in (1, 2, 3, 1, 1, 2):
        tree.use(k)
    assert [tree.evict() for _ in range(3)] == [[1], [2], [3]]


@pytest.mark.parametrize("name", EVICTIONS.names())
def test_leaves_go_before_what_they_hang_on(name):
    tree = make(name)
    tree.use(1, 2)
    tree.use(1, 3)
    tree.use(4)
    order = [tree.evict()[0] for _ in range(4)]
    assert order.index(1) > max(order.index(2), order.index(3)) and sorted(order) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", EVICTIONS.names())
def test_only_the_needed_tail_of_a_leaf_goes(name):
    tree = make(name)
    tree.use(1)
    assert sorted(tree.tree.evict(3).tolist()) == [107, 108, 109]
    assert tree.tree.match(NS, array(range(100, 110))).length == 7
    tree.tree.check()


@pytest.mark.parametrize("name", EVICTIONS.names())
def test_a_locked_path_stays(name):
    tree = make(name)
    tree.use(1, 2)
    tree.use(1, 3)
    handle = tree.tree.lock(tree.tree.match(NS, array([*range(100, 110), *range(200, 205)])))
    assert len(tree.tree.evict(100)) == 15
    assert handle.locs().tolist() == [*range(100, 110), *range(200, 205)]
    tree.tree.check()


@pytest.mark.parametrize("name", EVICTIONS.names())
def test_many_locks_and_unlocks_leave_the_order_right(name):
    tree = make(name)
    tree.use(1)
    for _ in range(500):
        tree.use(2)
    tree.use(1)
    assert tree.evict() == ([1] if name in ("lfu", "fifo") else [2])


def test_arc_protects_what_was_found_again_from_a_scan():
    tree = make("arc")
    tree.use(1)
    tree.use(1)
    for k in range(2, 6):
        tree.use(k)
    for k in range(6, 30):
        tree.evict()
        tree.use(k)
    assert tree.holds(1)


def test_lru_does_not():
    tree = make("lru")
    tree.use(1)
    tree.use(1)
    for k in range(2, 6):
        tree.use(k)
    for k in range(6, 30):
        tree.evict()
        tree.use(k)
    assert not tree.holds(1)


def test_arc_gives_the_recent_list_room_when_its_ghosts_come_back():
    tree = make("arc")
    for k in (1, 1, 2, 2, 3, 4):
        tree.use(k)
    assert tree.evict() == [3]
    tree.use(3)  # its ghost was remembered: T1 may now keep 10 tokens, and 3 is frequent
    assert tree.evict() == [1]
    assert tree.evict() == [2]
    assert tree.holds(4)


def test_arc_takes_it_back_when_the_frequent_ghosts_come_back():
    tree = make("arc")
    for k in (1, 1, 2, 2, 3, 4):
        tree.use(k)
    tree.evict()
    tree.use(3)
    assert tree.evict() == [1]
    tree.use(1)
    assert tree.evict() == [4]


def test_arc_finds_the_ghost_of_a_tail_in_whole_pages():
    tree = Tree(AdaptiveEviction(), page_size=5)
    tree.use(1)
    tree.use(2)
    assert tree.evict(5) == [1]
    assert tree.use(1) == 5
    tree.use(3)
    assert tree.evict(10) == [2]


def test_arc_keeps_its_books_through_splits():
    policy = AdaptiveEviction()
    tree = Tree(policy)
    tree.use(1, 2)
    tree.use(1, 2)
    assert policy._tokens == [0, 20]
    tree.use(1, 3)  # splits a frequent node: both parts stay frequent
    assert policy._tokens == [10, 20]
    assert tree.evict() == [3]
    tree.use(1, 3)  # its ghost is found below the new upper part
    assert policy._tokens == [0, 30] and policy._target == 10
    assert policy._ghosts[0].n_tokens == policy._ghosts[1].n_tokens == 0


def test_arc_finds_a_ghost_from_before_the_split():
    policy = AdaptiveEviction()
    tree = Tree(policy)
    tree.use(1, 2)
    assert tree.evict() == [2]
    tree.use(1, 3)  # grows the rest of the leaf in place
    tree.use(1, 2)  # splits it, and 2 comes back below the upper part
    assert policy._target == 10 and policy._ghosts[0].n_tokens == 0


def test_an_unknown_policy_is_named():
    with pytest.raises(ConfigError, match="lru"):
        EVICTIONS.get("mru")
