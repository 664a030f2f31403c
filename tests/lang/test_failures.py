"""Calls that fail, and programs that are cancelled: whoever reads is told, is told why, and never waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import bough as sgl
from bough.lang.backends.base import AsyncBackend, BaseBackend
from bough.lang.errors import BackendError, Cancelled

from .test_beyond import two
from .test_joining import Gated


class Flaky(BaseBackend):
    """Blocks, as a user's own backend may; fails the first times."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)

    def generate(self, s: Any, sampling_params: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        if self.errors:
            raise self.errors.pop(0)
        return "ok", {}


def unset(state: Any) -> list[Any]:
    """The variables of a state with nothing left to do for which somebody would wait for ever."""
    ex = state.stream_executor
    ex.sync()
    events = [*ex.variable_event.items(), *(ex.stream_var_event or {}).items()]
    return [name for name, event in events if not event.is_set()]


def test_retries() -> None:
    again = two.options(retry=sgl.Retry(attempts=3, delay=0.0))
    passing = [BackendError("busy", 503), BackendError("later", 429, retry_after=0.0)]
    state = again.run(backend=Flaky(*passing))
    assert state["b"] == "ok" and state.report().calls[0].attempts == 3
    for wrong in (BackendError("wrong", 400), RuntimeError("bug")):
        state = again.run(backend=Flaky(wrong))
        assert not unset(state)
        with pytest.raises(sgl.ProgramError, match=r"gen\('a'\) at .*test_beyond.py:\d+ in two failed") as caught:
            state["a"]
        assert caught.value.__cause__ is wrong


def test_cancelling_a_program_stops_its_calls() -> None:
    backend = Gated({}, held=("x",))
    state = two.run(backend=backend)
    while not backend.running:
        time.sleep(0.001)
    state.cancel("enough")
    assert not unset(state)
    with pytest.raises(Cancelled, match="enough"):
        state["a"]
    assert backend.stopped == ["x"] and isinstance(state.error(), Cancelled)


def test_nothing_hangs_after_a_cancellation() -> None:
    state = two.run(backend=Gated({}, held=("x",)))
    state.cancel("enough")
    state += "more" + sgl.gen("c")
    assert not unset(state)
    with pytest.raises(Cancelled, match="enough"):
        state["c"]
    state += sgl.gen("d")
    assert not unset(state)
    assert state.get_meta_info("d") is None
    with pytest.raises(Cancelled, match="enough"):
        state["d"]


def test_nothing_hangs_after_a_failure() -> None:
    state = two.run(backend=Flaky(RuntimeError("down")))
    state += "more" + sgl.gen("c")
    assert not unset(state)
    assert state.text() == "x" and str(state.error()) == "down"
    for name in "abc":
        with pytest.raises(KeyError, match="down"):
            state[name]
    with pytest.raises(sgl.ProgramError, match="down"):
        list(two.run(backend=sgl.FakeBackend({"x": RuntimeError("down")}), stream=True).text_iter())


def more_gen(s: Any) -> Any:
    s += "more" + sgl.gen("b")
    assert not unset(s)
    return s["b"]


def more_meta(s: Any) -> Any:
    s += sgl.gen("b")
    assert not unset(s)
    return s.get_meta_info("b") or s["b"]


def more_select(s: Any) -> Any:
    s += sgl.select("b", ["x", "y"])
    assert not unset(s)
    return s["b"]


def more_scope(s: Any) -> Any:
    with s.var_scope("b"):
        s += "more"
    assert not unset(s)
    return s["b"]


def more_branches(s: Any) -> Any:
    forks = s.fork(2)
    forks += sgl.gen("b")
    assert not any(unset(fork) for fork in forks)
    return forks[1]["b"]


def more_joined(s: Any) -> None:
    forks = s.fork(2)
    forks += sgl.gen("b")
    assert not any(unset(fork) for fork in forks)
    forks.join()


def more_awaited(s: Any) -> Any:
    s += sgl.gen("b")
    assert not unset(s)
    return asyncio.run(s.get("b"))


@pytest.mark.parametrize(
    "more", [more_gen, more_meta, more_select, more_scope, more_branches, more_joined, more_awaited]
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_appended_after_a_failure_fails(more: Callable[[Any], Any], stream: bool) -> None:
    """Whoever reads it is told, instead of waiting for what will never be."""

    @sgl.function
    def goes_on(s: Any, question: str) -> Any:
        s += question + sgl.gen("a")
        s.error()
        return more(s)

    backend = sgl.FakeBackend({"boom": RuntimeError("down")})
    seen: list[Any] = []

    def run() -> None:
        try:
            state = goes_on.run("boom", backend=backend, stream=stream)
            list(state.text_iter("b"))
        except Exception as error:
            seen.append(error)
        seen.extend(goes_on.run_batch([{"question": q} for q in ("hi", "boom", "ho")], backend=backend))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(seen[0], sgl.ProgramError) and "down" in str(seen[0])
    assert [str(state.error()) for state in seen[1:]] == ["None", "down", "None"]


def test_a_body_that_fails_in_a_stream_is_heard() -> None:
    @sgl.function
    def broken(s: Any) -> None:
        s += "a"
        raise ZeroDivisionError("oops")

    state = broken.run(backend=sgl.FakeBackend(), stream=True)
    with pytest.raises(sgl.ProgramError, match="oops"):
        list(state.text_iter())
    assert isinstance(state.error(), ZeroDivisionError)


class Asked(AsyncBackend):
    """Notes how many tokens it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int | None] = []

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        self.tokens.append(sampling_params.max_new_tokens)
        return "a", {"completion_tokens": sampling_params.max_new_tokens or 3}


@sgl.function
def one(s: Any) -> None:
    s += "x" + sgl.gen("a")


def test_a_backend_may_be_asked_for_as_many_tokens_as_it_likes() -> None:
    backend = Asked()
    assert one.run(backend=backend, max_new_tokens=None).error() is None
    assert one.options(limits=sgl.Limits(tokens=9)).run(backend=backend, max_new_tokens=None).error() is None
    assert backend.tokens == [None, 9]


def test_what_is_generated_ahead_is_within_the_budget() -> None:
    @sgl.function(num_api_spec_tokens=64)
    def ahead(s: Any) -> None:
        s += "x" + sgl.gen("a", max_tokens=3)

    backend = Asked()
    ahead.options(limits=sgl.Limits(tokens=5)).run(backend=backend).sync()
    assert backend.tokens == [5]


def test_what_was_rejected_is_wasted_by_the_call_that_made_it() -> None:
    """Others of the program may have begun meanwhile."""
    begun = threading.Event()

    class Ordered(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            if sampling_params.max_new_tokens == 2:
                await asyncio.to_thread(begun.wait, 30)
            else:
                begun.set()
                await asyncio.sleep(0)
            return await super().agenerate(s, sampling_params)

    @sgl.function
    def branches(s: Any) -> None:
        s += "x"
        strict, other = s.fork(2)
        strict += sgl.gen("v", max_tokens=2, validate=lambda v: False)
        other += sgl.gen("v", max_tokens=3)
        other.sync()
        assert strict.error() is not None

    state = branches.run(backend=Ordered(default="one two three four"))
    state.sync()
    wasted = {call.generated_tokens: call.wasted_tokens for call in state.report().calls if call.kind == "generate"}
    assert wasted == {2: 2, 3: 0}
