"""Groups of rows that share leading cells: true, disjoint, and the ones that save most."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bough.base.messages import Namespace
from bough.base.plan import Ints, SharedPrefix
from bough.kv.manager import KVManager
from bough.kv.sharing import Sharing


def array(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def admit(kv: KVManager, prompt: list[int], salt: str = "") -> tuple[int, int]:
    """(row, cached tokens) of a prompt that is planned as a whole."""
    ids = array(prompt)
    admission = kv.admit(Namespace(salt=salt), ids, len(ids) - 1)
    assert admission is not None
    assert kv.grow(admission.row, len(ids) - admission.cached_len) is not None
    kv.publish(admission.row, ids, len(ids))
    return admission


def groups(kv: KVManager, rows: list[int], start: list[int]) -> list[tuple[list[int], int]]:
    return [(rows.tolist(), n) for rows, n in kv.shared(array(rows), array(start))]


def test_siblings_share_what_they_matched() -> None:
    kv = KVManager(1000, 1, n_rows=8, max_len=100)
    stem = list(range(20))
    rows, start = zip(*(admit(kv, [*stem, 100 + i, 7]) for i in range(3)))
    assert start == (0, 20, 20)
    assert groups(kv, list(rows), list(start)) == [([1, 2], 20)], "the first one computes the prefix in this very step"
    assert groups(kv, list(rows), [22] * 3) == [([0, 1, 2], 20)]
    assert groups(kv, [rows[2], rows[0]], [22] * 2) == [([0, 1], 20)], "by index in the plan"
    assert groups(kv, [rows[0]], [22]) == []
    kv.release(rows[0], array([*stem, 100, 7]), 22)
    assert groups(kv, [rows[1], rows[2]], [22] * 2) == [([0, 1], 20)]
    kv.release(rows[1], array([*stem, 101, 7]), 22)
    assert groups(kv, [rows[2]], [22]) == []


def test_a_row_joins_the_group_that_saves_it_most() -> None:
    kv = KVManager(1000, 1, n_rows=8, max_len=100)
    system = list(range(10))
    left, right = [*system, *range(20, 50)], [*system, *range(60, 62)]
    rows = [admit(kv, [*left, 100 + i])[0] for i in range(2)] + [admit(kv, [*right, 200 + i])[0] for i in range(2)]
    # 40 tokens by two save 20 each, 10 by four 7.5; but 12 by two save only 6.
    assert groups(kv, rows, [90] * 4) == [([0, 1], 40), ([2, 3], 10)]


def test_the_same_groups_are_told_by_the_same_object() -> None:
    sharing = Sharing(array([0, 0, 1, 1, -1]), array([8, 4]))

    def plan(rows: list[int], start: list[int]) -> list[tuple[list[int], int]]:
        return [(members.tolist(), n) for members, n in sharing.plan(array(rows), array(start))]

    whole = sharing.plan(array([0, 1, 2, 3, 4]), array([8, 9, 4, 5, 0]))
    assert plan([0, 1, 2, 3, 4], [8, 9, 4, 5, 0]) == [([0, 1], 8), ([2, 3], 4)]
    assert sharing.plan(array([0, 1, 2, 3, 4]), array([9, 10, 5, 6, 1])) is whole
    assert plan([0, 1, 2, 3, 4], [9, 7, 5, 6, 1]) == [([2, 3], 4)], "who writes the prefix stays outside"
    assert plan([4, 1, 0], [2, 11, 10]) == [([1, 2], 8)]


def test_tenants_share_nothing() -> None:
    kv = KVManager(1000, 1, n_rows=8, max_len=100)
    prompt = list(range(20))
    rows = [admit(kv, prompt, salt)[0] for salt in "ab"]
    assert groups(kv, rows, [20] * 2) == []


def test_without_a_tree_there_are_no_groups() -> None:
    kv = KVManager(1000, 1, n_rows=8, max_len=100, cache="none")
    rows = [admit(kv, list(range(20)))[0] for _ in range(2)]
    assert groups(kv, rows, [20] * 2) == []


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    leave=st.sets(st.integers(0, 7)),
    page_size=st.sampled_from([1, 2]),
)
def test_groups_are_true(prompts: list[list[int]], leave: set[int], page_size: int) -> None:
    kv = KVManager(400, page_size, n_rows=8, max_len=40)
    rows = []
    for i, letters in enumerate(prompts):
        prompt = [x for x in letters for _ in range(page_size)]
        row, cached = admit(kv, prompt)
        rows.append((row, cached))
        if i in leave:
            kv.release(row, array(prompt), len(prompt))
            rows.pop()
    planned = array([row for row, _ in rows])
    start = array([cached for _, cached in rows])
    shared = kv.shared(planned, start) if rows else ()
    members = [i for prefix in shared for i in prefix.rows.tolist()]
    assert len(set(members)) == len(members)
    for prefix in shared:
        assert isinstance(prefix, SharedPrefix) and len(prefix.rows) > 1 and prefix.n_tokens > 0
        assert (start[prefix.rows] >= prefix.n_tokens).all()
        locs = [kv.row_locs(row, 0, prefix.n_tokens) for row in planned[prefix.rows].tolist()]
        assert all(np.array_equal(locs[0], other) for other in locs)
