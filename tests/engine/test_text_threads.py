"""Long texts take turns; short ones do not wait for them."""

from __future__ import annotations

import asyncio
import threading

from bough.engine.text_threads import UNIT, TextThreads


def test_long_texts_are_worked_on_within_a_bound_of_characters() -> None:
    async def body() -> None:
        threads = TextThreads(units=4)
        go, lock = threading.Event(), threading.Lock()
        at_work, most = 0, 0

        def work(size: int) -> int:
            nonlocal at_work, most
            with lock:
                at_work += size
                most = max(most, at_work)
            go.wait()
            with lock:
                at_work -= size
            return size

        sizes = [3 * UNIT, 2 * UNIT, UNIT, 9 * UNIT, 2 * UNIT]
        tasks = [asyncio.create_task(threads.run(lambda size=size: work(min(size, 4 * UNIT)), size)) for size in sizes]
        assert await threads.run(lambda: "short", 100) == "short"
        go.set()
        assert await asyncio.gather(*tasks) == [min(size, 4 * UNIT) for size in sizes]
        assert most <= 4 * UNIT
        threads.close()

    asyncio.run(body())


def test_a_text_that_nobody_waits_for_any_more_still_counts() -> None:
    async def body() -> None:
        threads = TextThreads(units=2)
        begun, go, order = threading.Event(), threading.Event(), list[str]()

        def first() -> None:
            begun.set()
            go.wait()
            order.append("first")

        task = asyncio.create_task(threads.run(first, 2 * UNIT))
        assert await threads.run(lambda: begun.wait(60))
        task.cancel()
        waiting = [asyncio.create_task(threads.run(lambda name=name: order.append(name), UNIT)) for name in "abc"]
        assert await threads.run(lambda: 1) == 1
        waiting[0].cancel()
        assert await threads.run(lambda: order == [])
        go.set()
        await asyncio.gather(*waiting[1:])
        assert order[0] == "first" and sorted(order[1:]) == ["b", "c"]
        threads.close()

    asyncio.run(body())
