"""The pool as a whole: cells are data, so a cell that is reused too early shows as a wrong value."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bough.base.messages import Namespace
from bough.base.plan import first_seen
from bough.kv.eviction import EVICTIONS
from bough.kv.manager import KVManager, WindowSize
from bough.kv.window import WindowPages

SPACES = st.sampled_from((Namespace(), Namespace(salt="a")))
LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def array(values):
    return np.array(values, dtype=np.int32)


class PoolMachine(RuleBasedStateMachine):
    """A pool small enough to be full most of the time. A cell holds (namespace, all tokens up to its own)."""

    page_size = 1
    eviction = "lru"
    cache = "radix"
    window = None

    def __init__(self):
        super().__init__()
        self.kv = KVManager(
            24 * self.page_size,
            self.page_size,
            n_rows=4,
            max_len=16 * self.page_size,
            eviction=self.eviction,
            cache=self.cache,
            window=self.window,
        )
        self.cells = {}
        self.window_cells = {}
        self.rows = {}
        self.valid = {}
        self.waiting = 0

    def expand(self, letters):
        return [x for x in letters for _ in range(max(1, self.page_size - 1))]

    def write(self, row, start):
        """The device computes the row's cells from ``start``; so their KV is valid."""
        ns, ids = self.rows[row]
        end = int(self.kv.n_cells[row])
        for position, loc in enumerate(self.kv.row_locs(row, start, end).tolist(), start):
            self.cells[loc] = (ns, tuple(ids[: position + 1]))
            if self.window is not None:
                (at,) = self.kv.window_locs(array([loc])).tolist()
                assert at >= 0, "a new token has nowhere to go"
                self.window_cells[at] = (ns, tuple(ids[: position + 1]))
        self.valid[row] = end

    def check_growth(self, locs, needed, possible, before):
        """Cells are refused exactly when there are none; then nothing changed but that windows moved on."""
        if locs is not None:
            assert possible
            return
        assert not possible or needed * self.page_size > self.kv._window.available
        assert before == replace(self.kv.usage(), window_idle=0)

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.rows)))

    @rule(ns=SPACES, letters=LETTERS, limit=st.integers(0, 300))
    def admit(self, ns, letters, limit):
        ids = self.expand(letters)
        expected = self.kv.match_len(ns, array(ids), limit)
        admission = self.kv.admit(ns, array(ids), limit)
        assert (admission is None) == (len(self.rows) == 4)
        if admission is not None:
            assert admission.cached_len <= expected <= limit
            assert admission.cached_len == expected or self.window is not None
            self.rows[admission.row] = (ns, ids)
            self.valid[admission.row] = admission.cached_len

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), letters=LETTERS, publish=st.booleans())
    def grow(self, data, letters, publish):
        row = self.pick(data)
        ns, ids = self.rows[row]
        start = int(self.kv.n_cells[row])
        more = self.expand(letters)
        if start + len(more) > self.kv.table.max_len:
            with pytest.raises(ValueError):
                self.kv.grow(row, len(more))
            return
        needed = -(-(start + len(more)) // self.page_size) + start // -self.page_size
        possible = needed * self.page_size <= self.kv.available
        before, own = replace(self.kv.usage(), window_idle=0), self.kv.row_locs(row, 0, start).tolist()
        locs = self.kv.grow(row, len(more))
        self.check_growth(locs, needed, possible, before)
        if locs is None:
            assert own == self.kv.row_locs(row, 0, start).tolist()
            return
        assert locs.dtype == np.int32 and locs.tolist() == self.kv.row_locs(row, start, start + len(more)).tolist()
        self.rows[row] = (ns, ids[:start] + more)
        if publish:  # before it is written, as a planner does
            self.publish(row)
        self.write(row, start)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow_rows(self, data, token):
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        if any(self.kv.n_cells[row] == self.kv.table.max_len for row in rows):
            with pytest.raises(ValueError):
                self.kv.grow_rows(array(rows))
            return
        needed = sum(int(self.kv.n_cells[row]) % self.page_size == 0 for row in rows)
        possible = needed * self.page_size <= self.kv.available
        before = replace(self.kv.usage(), window_idle=0)
        locs = self.kv.grow_rows(array(rows))
        self.check_growth(locs, needed, possible, before)
        if locs is None:
            return
        for row, loc in zip(rows, locs.tolist(), strict=True):
            end = int(self.kv.n_cells[row])
            assert self.kv.row_locs(row, end - 1, end).tolist() == [loc]
            ns, ids = self.rows[row]
            self.rows[row] = (ns, [*ids[: end - 1], token])
            self.write(row, end - 1)

    def publish(self, row):
        _, ids = self.rows[row]
        upto = int(self.kv.n_cells[row])
        before = self.kv.row_locs(row, 0, upto).tolist()
        published = int(self.kv.n_published[row])
        after = self.kv.publish(row, array(ids), upto)
        assert after in (published, upto // self.page_size * self.page_size)
        assert self.kv.row_locs(row, 0, upto).tolist() == before, "the device would not learn of it"

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def publish_now(self, data):
        self.publish(self.pick(data))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data, share):
        row = self.pick(data)
        cells, published = int(self.kv.n_cells[row]), int(self.kv.n_published[row])
        length = int(share * cells)
        if length < published or (self.window is not None and not self.kv._window.sees(row, length)):
            with pytest.raises(ValueError):
                self.kv.truncate(row, length)
            return
        self.kv.truncate(row, length)
        assert self.kv.n_cells[row] == length
        self.valid[row] = min(self.valid[row], length)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        row = self.pick(data)
        ns, ids = self.rows.pop(row)
        upto = int(self.kv.n_cells[row])
        whole = upto // self.page_size * self.page_size
        self.kv.release(row, array(ids), upto if keep else None)
        if keep and self.cache == "radix":
            assert self.kv.match_len(ns, array(ids[:upto]), upto) == whole
        elif self.cache == "none":
            assert self.kv.match_len(ns, array(ids), upto) == 0

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), letters=LETTERS, siblings=st.integers(0, 2))
    def fail(self, data, letters, siblings):
        """A row and siblings that share its unwritten cells are planned; the forward fails, all of them leave."""
        row = self.pick(data)
        ns, ids = self.rows[row]
        start = int(self.kv.n_cells[row])
        more = self.expand(letters)
        if start + len(more) > self.kv.table.max_len or self.kv.grow(row, len(more)) is None:
            return
        ids = ids[:start] + more
        self.rows[row] = (ns, ids)
        self.publish(row)
        young = []
        for _ in range(siblings):
            admission = self.kv.admit(ns, array(ids), len(ids))
            if admission is not None:
                young.append(admission)
        for admission in reversed(young):
            self.kv.discard(admission.row, admission.cached_len)
        self.kv.discard(row, start)
        del self.rows[row]

    @rule()
    def flush(self):
        before = self.kv.usage()
        assert self.kv.flush() == before.tree - before.locked
        assert self.kv.usage().tree == before.locked

    @rule(ns=SPACES, letters=LETTERS)
    def wait(self, ns, letters):
        ids = self.expand(letters)
        self.kv.waiting.add(self.waiting, ns, array(ids), len(ids) - 1)
        assert self.kv.waiting.length(self.waiting) == self.kv.match_len(ns, array(ids), len(ids) - 1)
        self.waiting += 1

    @invariant()
    def everything_has_one_owner(self):
        self.kv.check()
        self.kv.waiting.check()
        usage = self.kv.usage()
        assert usage.free + usage.tree + usage.private == usage.total == self.kv.capacity
        assert usage.rows == len(self.rows)
        assert self.kv.available == usage.free + usage.tree - usage.locked

    @invariant()
    def every_row_reads_its_own_prefix(self):
        for row, (ns, ids) in self.rows.items():
            locs = self.kv.row_locs(row, 0, self.valid[row]).tolist()
            for position, loc in enumerate(locs):
                assert self.cells[loc] == (ns, tuple(ids[: position + 1]))
            if self.window is not None:
                begin = max(0, first_seen(self.valid[row], self.window.window, self.window.chunked))
                seen = self.kv.window_locs(array(locs[begin:])).tolist()
                for position, loc in enumerate(seen, begin):
                    assert self.window_cells[loc] == (ns, tuple(ids[: position + 1])), "what the next token sees"

    def teardown(self):
        for row in list(self.rows):
            self.kv.release(row, array(self.rows[row][1]), None)
        self.kv.flush()
        assert self.kv.usage().free == self.kv.capacity
        assert self.kv.usage().window_free == self.kv.usage().window
        self.kv.check()


def machine(page_size, eviction, cache="radix", examples=25, window=None):
    options = {"page_size": page_size, "eviction": eviction, "cache": cache, "window": window}
    case = type("Case", (PoolMachine,), options).TestCase
    case.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return case


TestTokensLru = machine(1, "lru", examples=50)
TestTokensArc = machine(1, "arc")
TestFourLfu = machine(4, "lfu")
TestFourFifo = machine(4, "fifo")
TestSixteenLru = machine(16, "lru", examples=15)
TestSixteenArc = machine(16, "arc", examples=15)
TestNothingKept = machine(4, "lru", "none", examples=15)
TestWindowOfThree = machine(1, "lru", examples=50, window=WindowSize(3, 12))
TestWindowOfOne = machine(1, "arc", examples=15, window=WindowSize(1, 9))
TestWindowAcrossPages = machine(4, "lfu", window=WindowSize(6, 44))
TestChunks = machine(1, "lru", examples=40, window=WindowSize(4, 16, True))
TestChunksAcrossPages = machine(4, "lfu", window=WindowSize(6, 44, True))
TestWindowOfNothingKept = machine(4, "lru", "none", examples=15, window=WindowSize(5, 64))


def started(page_size, ids, **options):
    """A manager with one row that has computed and published ``ids``."""
    kv = KVManager(64 * page_size, page_size, 4, 32 * page_size, **options)
    row = kv.admit(Namespace(), array(ids), 0).row
    kv.grow(row, len(ids))
    kv.publish(row, array(ids), len(ids))
    return kv, row


def test_siblings_of_one_step_share_what_is_only_planned():
    ids = list(range(10))
    kv, row = started(4, ids)
    sibling = kv.admit(Namespace(), array([*ids, 77]), 10)
    assert sibling.cached_len == 8
    assert kv.row_locs(sibling.row, 0, 8).tolist() == kv.row_locs(row, 0, 8).tolist()
    assert kv.grow(sibling.row, 3)[0] != kv.row_locs(row, 8, 9)[0], "the last partial page is private"


def test_a_partial_page_is_filled_before_a_new_one_is_taken():
    kv, row = started(4, list(range(6)))
    last = int(kv.row_locs(row, 5, 6)[0])
    free = kv.pages.free
    assert kv.grow(row, 2).tolist() == [last + 1, last + 2] and kv.pages.free == free
    assert kv.grow_rows(array([row]))[0] % 4 == 0 and kv.pages.free == free - 1


def test_what_somebody_else_published_meanwhile_stays_private_until_the_release():
    kv = KVManager(64, 1, 4, 32)
    ids = array(range(8))
    first, second = (kv.admit(Namespace(), ids, 8).row for _ in range(2))
    for row in (first, second):
        kv.grow(row, 8)
    assert kv.publish(first, ids, 8) == 8
    own = kv.row_locs(second, 0, 8).tolist()
    assert kv.publish(second, ids, 8) == 0 and kv.row_locs(second, 0, 8).tolist() == own
    assert kv.usage().private == 8
    kv.release(second, ids, 8)
    assert kv.usage() == kv.usage().__class__(64, 56, 8, 8, 0, 1, 0)
    kv.check()


def test_a_retracted_row_finds_its_tokens_again():
    ids = list(range(11))
    kv, row = started(4, ids)
    kv.release(row, array(ids), 11)
    assert kv.admit(Namespace(), array(ids), 11).cached_len == 8
    assert kv.match_len(Namespace(salt="b"), array(ids), 11) == 0


def test_a_repeated_request_does_not_cut_the_tree_into_pieces():
    kv, row = started(1, list(range(16)))
    kv.release(row, array(range(16)), 16)
    again = kv.admit(Namespace(), array(range(8)), 0).row
    kv.grow(again, 8)
    kv.release(again, array(range(8)), 8)
    last = kv.admit(Namespace(), array(range(16)), 16)
    assert kv._handles[last.row].node.n_tokens == 16
    kv.check()


def test_discarding_the_writer_before_its_readers_is_refused():
    kv, row = started(1, list(range(8)))
    kv.admit(Namespace(), array(range(8)), 6)
    with pytest.raises(RuntimeError):
        kv.discard(row, 0)


def test_the_pool_is_evicted_before_a_row_is_refused():
    ids = list(range(20))
    kv, row = started(1, ids)
    kv.release(row, array(ids), 20)
    rows = [kv.admit(Namespace(), array([100 + i]), 0).row for i in range(2)]
    assert kv.grow(rows[0], 32) is not None and kv.grow(rows[1], 31) is not None
    assert kv.usage().evicted == 19 and kv.available == 1
    assert kv.grow_rows(array(rows[1:])) is not None
    assert kv.grow_rows(array([kv.admit(Namespace(), array([1]), 0).row])) is None
    kv.check()


def test_capacity_is_whole_pages():
    kv = KVManager(18, 4, 2, 15)
    assert kv.capacity == 16
    assert KVManager(9, 4, 2, 100).capacity == 8


def test_a_row_that_is_not_admitted_is_refused():
    kv = KVManager(8, 1, 2, 8)
    ids = array([1])
    for use in (
        lambda: kv.grow(0, 1),
        lambda: kv.publish(0, ids, 0),
        lambda: kv.truncate(0, 0),
        lambda: kv.release(0, ids, None),
        lambda: kv.discard(-1, 0),
        lambda: kv.row_locs(2, 0, 0),
    ):
        with pytest.raises(ValueError):
            use()


@pytest.mark.parametrize("name", EVICTIONS.names())
def test_equal_histories_give_equal_pools(name):
    def history():
        kv, rng = KVManager(64, 2, 4, 24, name), np.random.default_rng(7)
        seen = []
        for _ in range(200):
            ids = rng.integers(0, 2, 20).astype(np.int32)
            row = kv.admit(Namespace(), ids, 19).row
            kv.grow(row, 20 - int(kv.n_cells[row]))
            seen.append(kv.row_locs(row, 0, 20).tolist())
            kv.release(row, ids, 20)
        return seen

    assert history() == history()


def windowed(n_tokens, window, n_window, page_size=1):
    return KVManager(n_tokens, page_size, 4, 64, window=WindowSize(window, n_window))


def run(kv, ids, cached=64):
    """Admit ``ids``, compute the rest one by one and leave; how many came from the cache."""
    row, found = kv.admit(Namespace(), array(ids), min(cached, len(ids) - 1))
    for _ in range(len(ids) - found):
        assert kv.grow(row, 1) is not None
    kv.release(row, array(ids), len(ids))
    kv.check()
    return found


def test_a_long_sequence_needs_a_window_and_no_more():
    kv = windowed(64, 4, 6)
    assert run(kv, range(60)) == 0
    assert kv.usage().window == 6 and kv.usage().tree == 60


def test_a_prefix_is_taken_as_far_as_the_windows_are_there():
    kv = windowed(64, 4, 8)
    ids = list(range(20))
    run(kv, ids)
    assert run(kv, [*ids, 99]) == 20, "the end of a sequence is left last"
    assert kv.match_len(Namespace(), array([*range(10), 77, 78]), 11) == 10
    assert run(kv, [*range(10), 77, 78]) == 0, "the window before its branch is gone"
    assert run(kv, [*range(10), 88, 89, 90]) == 10, "what was computed again is there for the next one"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 9), st.sampled_from((1, 2, 4)), st.booleans())
def test_what_can_be_served_equals_its_definition(lost, window, size, chunked):
    pages = WindowPages(16 * size, 16, size, 1, window, chunked)
    ids = array(range(len(lost)))
    pages.enter(0, ids[:0])
    pages.take(ids)
    gone = ids[np.array(lost, np.bool_)]
    pages.give_back(gone)
    pages.forget(gone)

    def seen(length):
        first = length - length % window if chunked else max(0, length - window + 1)
        return all(not lost[p // size] for p in range(first, length))

    assert pages.servable(ids) == max(n * size for n in range(len(lost) + 1) if seen(n * size))


def test_a_chunk_that_is_complete_is_seen_by_nobody_behind_it():
    kv = KVManager(64, 1, 4, 64, window=WindowSize(4, 5, True))
    ids = list(range(20))
    assert run(kv, ids) == 0
    assert run(kv, [*range(8), 77, 78]) == 8, "at the end of a chunk nothing is needed"
    assert run(kv, [*range(14), 79]) == 12, "a part of the begun chunk is gone"


def test_the_queue_of_pages_that_were_left_stays_short():
    kv = windowed(64, 2, 40)
    for i in range(200):
        run(kv, [1000 + i] * 30, cached=0)
        kv.flush()
    assert sum(len(pages) for _, pages in kv._window._queue) <= 2 * 40 + 64
