"""Texts take turns by tenant and by size, and short ones do not wait for long ones."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.engine.text_threads import LARGE, TextThreads
from bough.text.memory import PIECE, Steps


def pieces(sizes: list[int], work: Callable[[int], object]) -> Steps[int]:
    """``work`` on a piece of each of the ``sizes``; their number."""
    for size in sizes:
        yield size
        work(size)
    return len(sizes)


texts = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(texts)
def test_tenants_take_turns_with_every_piece(texts: list[tuple[str, int]]) -> None:
    done: list[int] = []

    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        try:
            steps = [
                pieces([PIECE] * n, lambda _, i=i: done.append(i)) for i, (_, n) in enumerate(texts)
            ]  # fmt: skip
            work = [threads.run_steps(each, tenant) for each, (tenant, _) in zip(steps, texts)]
            assert await asyncio.gather(*work) == [n for _, n in texts]
        finally:
            threads.close()

    asyncio.run(body())
    assert Counter(done) == {i: n for i, (_, n) in enumerate(texts)}
    for i, (tenant, _) in enumerate(texts):
        at = [k for k, each in enumerate(done) if each == i]
        own = sum(other == tenant for other, _ in texts)
        others = len({other for other, _ in texts} - {tenant})
        for before, after in zip(at, at[1:]):
            # Of each lane: a piece of each of its tenant's texts, and between two of these one of every other tenant,
            # one of which may be at work when it comes.
            assert after - before <= 2 * (own * (others + 1) + 1)


def test_a_small_text_waits_for_a_few_pieces_of_the_large_ones_before_it() -> None:
    async def body() -> list[str]:
        threads, order = TextThreads((1, 1, 1, 1)), list[str]()
        go = threading.Event()
        held = asyncio.create_task(threads.run_steps(pieces([PIECE, PIECE], lambda _: go.wait()), "alice"))
        large = [
            asyncio.create_task(threads.run_steps(pieces([PIECE] * 50, lambda _: order.append("alice")), "alice"))
            for _ in range(8)
        ]
        await asyncio.sleep(0)
        small = asyncio.create_task(threads.run_steps(pieces([PIECE] * 2, lambda _: order.append("bob")), "bob"))
        await asyncio.sleep(0)
        go.set()
        assert await small == 2
        assert await asyncio.gather(*large) == [50] * 8 and await held == 2
        threads.close()
        return order

    order = asyncio.run(body())
    # Its first piece after one of alice's first ones, the second after one of her further ones in the other lane.
    assert order.count("alice") == 400 and [i for i, name in enumerate(order) if name == "bob"][-1] <= 16


def test_nothing_waits_for_what_is_much_larger() -> None:
    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        go = threading.Event()
        huge = asyncio.create_task(threads.run_steps(pieces([LARGE + 1], lambda _: go.wait()), "alice"))
        large = asyncio.create_task(threads.run_steps(pieces([LARGE], lambda _: go.wait()), "alice"))
        assert await threads.run_steps(pieces([PIECE] * 3, lambda _: None), "alice") == 3
        assert await threads.run(lambda: "short", "alice") == "short"
        assert not huge.done() and not large.done()
        go.set()
        assert await huge == await large == 1
        threads.close()

    asyncio.run(body())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([PIECE, PIECE + 1, LARGE, LARGE + 1, 9 * LARGE]), min_size=1, max_size=20))
def test_large_texts_are_worked_on_within_a_bound(sizes: list[int]) -> None:
    async def body() -> None:
        threads, lock = TextThreads((3, 2, 2, 1)), threading.Lock()
        at_work, most = Counter[int](), Counter[int]()

        def work(size: int) -> None:
            lane = (size > PIECE) + (size > LARGE)
            with lock:
                at_work[lane] += 1
                most[lane] = max(most[lane], at_work[lane])
            with lock:
                at_work[lane] -= 1

        await asyncio.gather(*[threads.run_steps(pieces([size], work), str(i % 3)) for i, size in enumerate(sizes)])
        assert most[0] <= 3 and most[1] <= 2 and most[2] <= 1
        threads.close()

    asyncio.run(body())


def test_nothing_is_begun_for_which_nobody_waits() -> None:
    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        begun, go, done = threading.Event(), threading.Event(), list[str]()

        def first(_: int) -> None:
            begun.set()
            go.wait()

        running = asyncio.create_task(threads.run_steps(pieces([LARGE, LARGE], first), "alice"))
        await threads.run(begun.wait)
        names = {name: threads.run_steps(pieces([LARGE], lambda _, name=name: done.append(name))) for name in "abc"}
        waiting = {name: asyncio.create_task(each) for name, each in names.items()}
        await asyncio.sleep(0)
        begun.clear()
        running.cancel()
        waiting["a"].cancel()
        await threads.run(lambda: None)
        assert not done  # the step that is under way still counts
        go.set()
        assert await waiting["b"] == await waiting["c"] == 1
        assert done == ["b", "c"] and not begun.is_set()
        threads.close()

    asyncio.run(body())


def test_errors_reach_who_waits_and_the_thread_goes_on() -> None:
    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        for sizes in ([PIECE], [1, PIECE]):
            with pytest.raises(ZeroDivisionError):
                await threads.run_steps(pieces(sizes, lambda size: 1 // (PIECE - size)))
        assert await threads.run(lambda: 7) == 7
        threads.close()

    asyncio.run(body())


def test_what_waits_is_dropped_at_the_end() -> None:
    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        begun, go = threading.Event(), threading.Event()

        def first(_: int) -> None:
            begun.set()
            go.wait()

        tasks = [asyncio.create_task(threads.run_steps(pieces([PIECE] * 2, first))) for _ in range(3)]
        await asyncio.to_thread(begun.wait)
        go.set()
        threads.close()
        assert all(
            isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True)
        )

    asyncio.run(body())


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_a_huge_text_took_goes_back_to_the_system() -> None:
    libc, size, n = ctypes.CDLL(None), 4000, 20_000
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    kept, after = list[int](), list[int]()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def work(_: int) -> None:
        blocks = [libc.malloc(size) for _ in range(n)]
        for block in blocks:
            ctypes.memset(block, 1, size)
        kept.append(blocks.pop())  # at the end of what the C library took, so that it keeps the rest
        for block in blocks:
            libc.free(block)
        after.append(resident())

    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        await threads.run_steps(pieces([LARGE + 1], work))
        threads.close()

    asyncio.run(body())
    assert resident() < after[0] - size * n // 2
    libc.free(kept[0])


def test_work_that_no_thread_can_take_fails_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        threads = TextThreads((1, 1, 1, 1))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_thread)
                for _ in range(3):
                    with pytest.raises(RuntimeError, match="no thread"):
                        await asyncio.wait_for(threads.run(int), 20)
            assert await asyncio.wait_for(threads.run(int), 20) == 0
        finally:
            threads.close()

    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("no thread can be started")

    asyncio.run(body())
