"""The event loop of the programs: no exception ends it, nothing that runs on it waits for it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

import bough as sgl
from bough.lang.backends.base import AsyncBackend, BaseBackend
from bough.lang.errors import Cancelled
from bough.lang.waiting import Signal, _Loop

from .test_failures import unset

FATAL = [SystemExit(3), KeyboardInterrupt(), BaseException("panic"), GeneratorExit(), asyncio.CancelledError("other")]


class Raises(BaseBackend):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def generate(self, s: Any, sampling_params: Any) -> Any:
        raise self.error


class RaisesHere(AsyncBackend):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        raise self.error


@sgl.function
def plain(s: Any) -> None:
    s += "x" + sgl.gen("a") + sgl.gen("b")


@sgl.function
def asking(s: Any, tool: Any) -> None:
    s += sgl.user("q")
    s += sgl.act("a", tools=[tool], max_steps=2)


def asked_for(tool: Any) -> sgl.FakeBackend:
    answer = '{"tool": "answer", "arguments": {"answer": "done"}}'
    return sgl.FakeBackend({"q": f'{{"tool": "{tool.__name__}", "arguments": {{}}}}', f"{tool.__name__}: ": answer})


def worked_off(program: Any, *args: Any, backend: Any) -> Any:
    """The state of a run on an event loop of its own, when its task is done and nobody would wait for it any more."""

    async def main() -> Any:
        backend.loop = asyncio.get_running_loop()
        state = program.run(*args, backend=backend)
        task = state.stream_executor._task
        while not task.done():
            await asyncio.sleep(0)
        assert not unset(state)
        return state

    return asyncio.run(main())


@pytest.mark.parametrize("error", FATAL, ids=lambda error: type(error).__name__)
def test_no_exception_of_a_backend_hangs_a_reader_or_ends_the_loop(error: BaseException) -> None:
    for backend in (Raises(error), RaisesHere(error)):
        state = worked_off(plain, backend=backend)
        with pytest.raises(sgl.ProgramError, match=rf"gen\('a'\) at .* failed: {type(error).__name__}"):
            state["b"]
        assert state.error() is error

    def reject(value: Any) -> None:
        raise error

    @sgl.function
    def checked(s: Any) -> None:
        s += "x" + sgl.gen("a", validate=reject)

    assert worked_off(checked, backend=sgl.FakeBackend()).error() is error


@pytest.mark.parametrize("error", FATAL[:4], ids=lambda error: type(error).__name__)
def test_a_tool_that_would_end_the_process_ends_its_program(error: BaseException) -> None:
    def sync() -> int:
        raise error

    async def coroutine() -> int:
        raise error

    for tool in (sync, coroutine):
        state = worked_off(asking, tool, backend=asked_for(tool))
        with pytest.raises(sgl.ProgramError, match=rf"act\('a'\) at .* failed: {type(error).__name__}"):
            state["a"]


def test_what_is_cancelled_inside_a_tool_is_told_to_the_model() -> None:
    async def looks_up() -> int:
        raise asyncio.CancelledError

    def runs_dry() -> int:
        return next(iter(()))

    for tool, told in ((looks_up, "CancelledError"), (runs_dry, "StopIteration")):
        state = worked_off(asking, tool, backend=asked_for(tool))
        assert state["a"] == "done" and told in state.get_meta_info("a")["tool_calls"][0]["error"]


def test_the_cancellation_of_a_program_is_none_of_its_tools() -> None:
    begun = threading.Event()

    async def waits() -> int:
        begun.set()
        await asyncio.Event().wait()
        return 0

    state = asking.run(waits, backend=asked_for(waits))
    begun.wait()
    state.cancel("enough")
    assert not unset(state)
    with pytest.raises(Cancelled, match="enough"):
        state["a"]


def test_the_loop_outlives_what_tasks_on_it_raise() -> None:
    own = _Loop()
    own.loop.call_soon_threadsafe(sys.exit, 3)
    found = asyncio.run_coroutine_threadsafe(asyncio.sleep(0, 7), own.loop)
    while not found.done():
        assert own._thread.is_alive()
        time.sleep(0)
    assert found.result() == 7
    own.end()
    assert own.loop.is_closed()


@pytest.mark.parametrize("error", [*FATAL[:3], ValueError("own")], ids=lambda error: type(error).__name__)
def test_what_a_coroutine_body_raises_is_raised_by_run(error: BaseException) -> None:
    @sgl.function
    async def fails(s: Any) -> None:
        s += "x"
        raise error

    with pytest.raises(type(error)) as caught:
        fails.run(backend=sgl.FakeBackend())
    assert caught.value is error
    assert plain.run(backend=sgl.FakeBackend())["b"] == "ok"
    followed = fails.run(backend=sgl.FakeBackend(), stream=True)
    with pytest.raises(sgl.ProgramError, match=type(error).__name__):
        list(followed.text_iter())


def joined(s: Any) -> None:
    forks = s.fork(2)
    forks += sgl.gen("a")
    forks.join()


def followed(s: Any) -> None:
    s += sgl.gen("a")
    list(s.text_iter("a"))


def copied(s: Any) -> None:
    with s.copy() as copy:
        copy += sgl.gen("a")


def forked(s: Any) -> None:
    s += sgl.gen("a")
    s.fork(2)


def read(s: Any) -> None:
    s += sgl.gen("a")
    s["a"]


def in_a_batch(s: Any) -> None:
    plain.run_batch([{}, {}], backend=s.stream_executor.backend)


def nested(s: Any) -> None:
    @sgl.function
    async def inner(s: Any) -> None:
        s += "x"

    inner.run(backend=s.stream_executor.backend)


@pytest.mark.parametrize(
    ("wait", "instead"),
    [
        (joined, "ajoin"), (followed, "async for"), (copied, "ajoin"), (forked, "afork"), (read, "s.get"),
        (in_a_batch, "arun"), (nested, "arun"),
    ],
)  # fmt: skip
def test_nothing_on_the_loop_waits_for_it(
    wait: Callable[[Any], None], instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sgl.function
    async def body(s: Any) -> None:
        wait(s)

    def waits(*_: Any) -> Any:
        raise AssertionError("this would wait for ever")

    async def main() -> None:
        backend = sgl.FakeBackend()
        backend.loop = asyncio.get_running_loop()
        with monkeypatch.context() as patch:
            patch.setattr(Signal, "wait", waits)
            patch.setattr(concurrent.futures.Future, "result", waits)
            with pytest.raises(RuntimeError, match=f"would wait for the event loop.*{instead}"):
                await body.arun(backend=backend)

    asyncio.run(main())


class City(pydantic.BaseModel):
    name: str


class Handle:
    def __init__(self) -> None:
        self.lock = threading.Lock()  # cannot be copied

    def __str__(self) -> str:
        return "handle 7"


class Unprintable:
    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (City(name="Oslo"), '{"name": "Oslo"}'),
        ([City(name="Oslo"), Handle()], '[{"name": "Oslo"}, "handle 7"]'),
        (Handle(), '"handle 7"'),
        (Unprintable(), "LookupError: no text"),
    ],
)
def test_tools_may_return_anything(result: Any, told: str) -> None:
    def look() -> Any:
        return result

    state = worked_off(asking, look, backend=asked_for(look))
    assert state["a"] == "done" and f"look: {told}" in state.text()
    assert state.get_meta_info("a")["tool_calls"][0]["result"] is result


def test_what_cannot_be_a_tool() -> None:
    def answer(x: int) -> int:
        return x

    def variadic(*values: int) -> int:
        return sum(values)

    def positional(x: int, /) -> int:
        return x

    with pytest.raises(ValueError, match="'answer'"):
        sgl.tool(answer)
    for func in (variadic, positional):
        with pytest.raises(TypeError, match="by its name"):
            sgl.tool(func)


class Endless(AsyncBackend):
    """Generates until it is stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.stopped = threading.Event(), threading.Event()

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()

    async def agenerate_stream(self, s: Any, sampling_params: Any) -> Any:
        yield "x", {}
        await self.agenerate(s, sampling_params)


@sgl.function
def broken(s: Any, backend: Endless) -> None:
    s += sgl.gen("a")
    assert backend.began.wait(60)
    raise ValueError("boom")


@sgl.function
async def waits(s: Any, backend: Endless) -> None:
    s += sgl.gen("a")
    await s.get("a")


@pytest.mark.parametrize("way", ["run", "stream", "batch", "left"])
def test_a_body_that_raises_stops_its_calls(way: str) -> None:
    backend = Endless()

    async def leave() -> None:
        state = await waits.arun(backend, backend=backend, stream=True)
        async for _ in state.text_async_iter("a"):
            break

    if way == "run":
        with pytest.raises(ValueError, match="boom"):
            broken.run(backend, backend=backend)
    elif way == "stream":
        with pytest.raises(sgl.ProgramError, match="boom"):
            list(broken.run(backend, backend=backend, stream=True).text_iter())
    elif way == "batch":
        (state,) = broken.run_batch([{"backend": backend}], backend=backend)
        assert isinstance(state.error(), ValueError)
    else:
        asyncio.run(leave())
    assert backend.stopped.wait(60)
