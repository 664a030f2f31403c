"""States that nobody holds any more: their calls stop, and nobody else's."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

import bough as sgl
from bough.lang.backends.base import AsyncBackend


class Held(AsyncBackend):
    """Generates "x" until it is told to end or stopped; ``ended`` says which, by the last character of the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[str, threading.Event] = {c: threading.Event() for c in "pqr"}
        self.over: dict[str, threading.Event] = {c: threading.Event() for c in "pqr"}
        self.ended: dict[str, str] = {}
        self.told = threading.Event()
        self._go = asyncio.Event()

    def go(self) -> None:
        self.loop_of_programs.call_soon_threadsafe(self._go.set)

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        self.loop_of_programs = asyncio.get_running_loop()
        name = s.text_.rstrip("x")[-1]
        self.began[name].set()
        try:
            await self._go.wait()
            self.ended[name] = "done"
        except asyncio.CancelledError:
            self.ended[name] = "stopped"
            raise
        finally:
            self.over[name].set()
        return "x", {"completion_tokens": 1}

    async def agenerate_stream(self, s: Any, sampling_params: Any) -> Any:
        yield "x", {}
        yield await self.agenerate(s, sampling_params)

    def end_program(self, s: Any) -> None:
        self.told.set()


@sgl.function
def lazy(s: Any) -> None:
    s += "p" + sgl.gen("a")


@sgl.function
def forking(s: Any, backend: Held) -> Any:
    left, right = s.fork(2)
    left += "q" + sgl.gen("a")
    right += "r" + sgl.gen("a")
    assert backend.began["q"].wait(60) and backend.began["r"].wait(60)
    return right


def over(backend: Held, name: str) -> str:
    assert backend.over[name].wait(60)
    return backend.ended[name]


@pytest.mark.parametrize("cycle", [False, True])
def test_a_state_that_is_dropped_stops_its_calls(cycle: bool) -> None:
    backend = Held()
    state = lazy.run(backend=backend)
    assert backend.began["p"].wait(60)
    if cycle:
        state.ret_value = state
    del state
    gc.collect()
    assert over(backend, "p") == "stopped" and backend.told.wait(60)


def test_a_fork_that_is_held_goes_on_without_the_others() -> None:
    backend = Held()
    right = forking.run(backend, backend=backend).ret_value
    gc.collect()
    assert over(backend, "q") == "stopped" and not backend.told.is_set()
    backend.go()
    assert right["a"] == "x" and over(backend, "r") == "done"
    del right
    gc.collect()
    assert backend.told.wait(60)


def test_whoever_reads_a_state_holds_it() -> None:
    backend = Held()
    pieces = lazy.run(backend=backend, stream=True).text_iter("a")
    assert next(pieces) == "x" and backend.began["p"].wait(60)
    gc.collect()
    assert not backend.over["p"].is_set()
    del pieces
    assert over(backend, "p") == "stopped"


def test_whoever_takes_the_executor_holds_the_state() -> None:
    backend = Held()
    executor = lazy.run(backend=backend).stream_executor
    assert backend.began["p"].wait(60)
    gc.collect()
    backend.go()
    assert executor.get_var("a") == "x" and over(backend, "p") == "done"


def test_coroutines_that_leave_a_state_stop_it() -> None:
    backend = Held()

    async def main() -> None:
        state = await lazy.arun(backend=backend, stream=True)
        async for _ in state.text_async_iter("a"):
            break
        while not backend.began["p"].is_set():
            await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert over(backend, "p") == "stopped"
