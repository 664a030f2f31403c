"""Who follows a streaming run from outside waits for its body, however late that begins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import bough as sgl
from bough.lang.errors import Cancelled
from bough.lang.waiting import Signal

MODEL = sgl.FakeBackend(default="yes")


@sgl.function
def late(s: Any, go: threading.Event, error: BaseException | None = None) -> str:
    """Appends nothing before it may."""
    assert go.wait(60)
    s += "x"
    s["early"] = 1
    s += sgl.gen("a")
    assert s.text() == "xyes"  # inside nobody waits for the end of the body
    if error is not None:
        raise error
    return "returned"


WAITS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "text": (lambda s: s.text(), "xyes"),
    "messages": (lambda s: s.messages(), []),
    "sync": (lambda s: (s.sync(), s.ret_value)[1], "returned"),
    "error": (lambda s: s.error(), None),
    "item": (lambda s: s["a"], "yes"),
    "set": (lambda s: s["early"], 1),
    "meta": (lambda s: s.get_meta_info("a", timeout=60) is not None, True),
    "fork": (lambda s: s.fork(1)[0].text(), "xyes"),
    "settled": (lambda s: asyncio.run(s.settled()).text(), "xyes"),
    "get": (lambda s: asyncio.run(s.get("a")), "yes"),
    "iter": (lambda s: "".join(s.text_iter()), "xyes"),
}


@pytest.mark.parametrize("way", WAITS)
def test_a_stream_is_waited_for_before_its_body_appends(way: str) -> None:
    go = threading.Event()
    state = late.run(go, backend=MODEL, stream=True)
    threading.Timer(0.1, go.set).start()  # later than the wait begins
    read, expected = WAITS[way]
    assert read(state) == expected


@pytest.mark.parametrize("way", ["text", "iter", "item", "error"])
def test_what_a_late_body_raises_is_heard(way: str) -> None:
    go = threading.Event()
    state = late.run(go, ValueError("boom"), backend=MODEL, stream=True)
    threading.Timer(0.1, go.set).start()
    if way == "item":
        assert state["a"] == "yes"  # it was there before
    elif way == "iter":
        with pytest.raises(sgl.ProgramError, match="boom"):
            list(state.text_iter())
    else:
        getattr(state, way)()
    assert isinstance(state.error(), ValueError)


def test_a_variable_that_never_comes_is_a_key_error() -> None:
    go = threading.Event()
    state = late.run(go, backend=MODEL, stream=True)
    threading.Timer(0.1, go.set).start()
    with pytest.raises(KeyError):
        state["nothing"]


def test_to_show_a_run_waits_for_nothing() -> None:
    go = threading.Event()
    state = late.run(go, backend=MODEL, stream=True)
    assert repr(state) == "ProgramState()"
    go.set()
    assert state.text() == "xyes" and repr(state) == "ProgramState(xyes)"


def test_a_timeout_counts_before_the_body_appends() -> None:
    go = threading.Event()
    state = late.run(go, backend=MODEL, stream=True)
    with pytest.raises(TimeoutError):
        state.get_meta_info("a", timeout=0.01)
    go.set()
    assert state.text() == "xyes"


def test_a_run_that_was_cancelled_is_not_waited_for() -> None:
    go = threading.Event()
    state = late.run(go, backend=MODEL, stream=True)
    state.cancel()
    assert isinstance(state.error(), Cancelled) and state.text() == ""
    go.set()


@sgl.function
async def coroutine(s: Any) -> str:
    s += "x"
    s += sgl.gen("a")
    await s.settled()
    return "returned"


@sgl.function
def plain(s: Any) -> str:
    s += "x"
    s += sgl.gen("a")
    return "returned"


@pytest.mark.parametrize("program", [coroutine, plain], ids=["coroutine", "thread"])
def test_coroutines_wait_for_a_body_that_has_not_begun(program: Any) -> None:
    async def main() -> None:
        state = await program.arun(backend=MODEL, stream=True)
        with pytest.raises(RuntimeError, match="settled"):
            state.text()  # the body needs this event loop
        assert (await state.settled()).text() == "xyes" and state.ret_value == "returned"
        state = await program.arun(backend=MODEL, stream=True)
        assert await state.get("a") == "yes"
        forks = await (await program.arun(backend=MODEL, stream=True)).afork(2)
        assert [fork.text() for fork in forks] == ["xyes", "xyes"]

    asyncio.run(main())


@pytest.mark.parametrize("closed", [False, True])
def test_nobody_waits_for_a_loop_that_does_not_run(closed: bool) -> None:
    loop = asyncio.new_event_loop()
    state = loop.run_until_complete(coroutine.arun(backend=MODEL, stream=True))
    if closed:
        loop.close()
    for wait in (state.text, state.error, lambda: state["nothing"], lambda: asyncio.run(state.settled())):
        with pytest.raises(RuntimeError, match="does not run"):
            wait()
    if not closed:
        loop.run_until_complete(state.settled())
        assert state.text() == "xyes"
        loop.close()


def test_a_body_that_is_cancelled_before_it_begins_has_ended() -> None:
    async def main() -> Any:
        return await coroutine.arun(backend=MODEL, stream=True)

    state = asyncio.run(main())
    assert isinstance(state.error(), asyncio.CancelledError)


def test_those_who_ring_at_once_lose_nobody() -> None:
    """A follower that reads ``news`` between two that ring is woken by one of them."""
    executor = plain.run(backend=MODEL).stream_executor
    taken: list[Signal] = []
    stop = threading.Event()

    def ring() -> None:
        while not stop.is_set():
            executor.ring()
            taken.append(executor.news)

    threads = [threading.Thread(target=ring) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(taken) < 200_000:
        threads[0].join(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    executor.ring()
    assert all(signal.is_set() for signal in taken if signal is not executor.news)
