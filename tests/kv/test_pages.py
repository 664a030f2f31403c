"""The free lists of pages and rows against plain sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.kv.page_table import PageTable
from bough.kv.pages import PageAllocator


@given(st.integers(1, 20), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=40), st.randoms())
def test_every_page_is_free_or_handed_out_once(n_pages, operations, rng):
    pages, taken, ever = PageAllocator(n_pages), set(), set()
    for allocate, n in operations:
        if allocate:
            got = pages.alloc(n)
            assert (got is None) == (n > n_pages - len(taken))
            if got is not None:
                assert got.dtype == np.int32 and len(set(got.tolist())) == n and not taken & set(got.tolist())
                taken |= set(got.tolist())
                ever |= taken
        else:
            back = rng.sample(sorted(taken), min(n, len(taken)))
            pages.free_pages(np.array(back, np.int32))
            taken -= set(back)
        pages.check()
        assert pages.free == n_pages - len(taken) and pages.taken().tolist() == sorted(taken)
        assert ever == set(range(pages.used))


@pytest.mark.parametrize("wrong", [[0, 0], [3], [-1], [9], [0, 1, 0]])
def test_a_wrong_page_raises_and_changes_nothing(wrong):
    pages = PageAllocator(4)
    pages.alloc(2)
    with pytest.raises(RuntimeError):
        pages.free_pages(np.array(wrong, np.int32))
    pages.check()
    assert pages.taken().tolist() == [0, 1]


def test_a_page_cannot_be_freed_again():
    pages = PageAllocator(4)
    got = pages.alloc(2)
    pages.free_pages(got)
    with pytest.raises(RuntimeError):
        pages.free_pages(got)


def test_rows_are_handed_out_lowest_first_then_the_last_one_given_back():
    table = PageTable(3, 8)
    assert [table.take_row() for _ in range(4)] == [0, 1, 2, None]
    table.give_row(1)
    table.give_row(0)
    assert table.free == 2 and not table.is_taken(0) and table.is_taken(2)
    with pytest.raises(RuntimeError):
        table.give_row(0)
    assert [table.take_row(), table.take_row()] == [0, 1]


def test_a_pool_needs_a_page_and_a_table_a_row():
    for make in (lambda: PageAllocator(0), lambda: PageTable(0, 1), lambda: PageTable(1, 0)):
        with pytest.raises(ValueError):
            make()
