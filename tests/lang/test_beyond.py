"""What the language does beyond SGLang's: tools, limits, batches, coroutines, reports, drawings."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bough as sgl

from .test_joining import Gated, vote


@sgl.tool
def add(a: int, b: int = 1) -> int:
    """The sum of two numbers."""
    return a + b


@sgl.tool(seconds=5)
async def fails(why: str) -> str:
    """Never works."""
    raise LookupError(why)


@sgl.function
def agent(s: Any, question: str) -> None:
    s += sgl.system(sgl.tools_prompt([add, fails]))
    s += sgl.user(question)
    s += sgl.act("answer", tools=[add, fails], max_steps=2, type=int)


def test_tools_are_called_until_there_is_an_answer() -> None:
    steps = [
        '{"tool": "add", "arguments": {"a": 2, "b": 3}}',
        '{"tool": "fails", "arguments": {"why": "no"}}',
        '{"tool": "answer", "arguments": {"answer": 5}}',
    ]
    backend = sgl.FakeBackend({"ASSISTANT:$": steps})
    state = agent.run("2+3?", backend=backend)
    assert state["answer"] == 5
    calls = state.get_meta_info("answer")["tool_calls"]
    assert [c["result"] for c in calls] == [5, None] and calls[1]["error"] == "LookupError: no"
    assert [m["role"] for m in state.messages()] == ["system", "user", *["assistant", "user"] * 2, "assistant"]
    assert state.messages()[3]["content"] == "add: 5"
    # After max_steps only an answer is allowed.
    last = backend.calls[-1].params
    assert last is not None and "fails" not in (last.json_schema or "") and "fails" in state.text()
    assert [c.kind for c in state.report().calls] == ["generate", "tool"] * 2 + ["generate"]


class City(pydantic.BaseModel):
    name: str


def test_tools_may_take_models() -> None:
    def visit(city: City, copy: list[City], schema: int = 3) -> str:
        return f"{city.name} {copy[0].name} {schema}"

    @sgl.function
    def trip(s: Any) -> None:
        s += sgl.user("?") + sgl.act("a", tools=[visit], type=list[City])

    steps = [
        '{"tool": "visit", "arguments": {"city": {"name": "Oslo"}, "copy": [{"name": "Rome"}]}}',
        '{"tool": "visit", "arguments": {"city": {"name": 3}, "copy": []}}',
        '{"tool": "answer", "arguments": {"answer": [{"name": "Oslo"}]}}',
    ]
    state = trip.run(backend=sgl.FakeBackend({"": steps}))
    assert state["a"] == [City(name="Oslo")]
    calls = state.get_meta_info("a")["tool_calls"]
    assert calls[0]["result"] == "Oslo Rome 3" and "ValidationError" in calls[1]["error"]
    about = sgl.tool(visit).parameters
    assert set(about["properties"]) == {"city", "copy", "schema"} and about["additionalProperties"] is False
    assert about["required"] == ["city", "copy"]


def test_wrong_arguments_are_told_to_the_model() -> None:
    steps = ['{"tool": "add", "arguments": {"a": "x"}}', '{"tool": "answer", "arguments": {"answer": 0}}']
    state = agent.run("?", backend=sgl.FakeBackend({"ASSISTANT:$": steps}))
    assert state["answer"] == 0 and "ValidationError" in state.messages()[3]["content"]


@sgl.function
def broad(s: Any, n: int, tokens: int) -> list[Any]:
    s += "x"
    forks = s.fork(n)
    forks += sgl.gen("v", max_tokens=tokens)
    return [fork.error() for fork in forks]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_branches_share_a_budget(n: int, tokens: int, budget: int) -> None:
    """Whatever was reserved and not used, others get; together they never generate more."""
    backend = sgl.FakeBackend(default="one two three four five")
    state = broad.options(limits=sgl.Limits(tokens=budget)).run(n, tokens, backend=backend)
    state.sync()
    assert state.report().total.generated == min(budget, n * min(tokens, 5))
    assert all(error is None or isinstance(error, sgl.LimitExceeded) for error in state.ret_value)


def test_a_stream_that_is_cut_counts_what_came() -> None:
    class Slow(sgl.FakeBackend):
        async def agenerate_stream(self, s: Any, sampling_params: Any) -> Any:
            async for piece, meta in super().agenerate_stream(s, sampling_params):
                yield piece, {**meta, "finish_reason": None}
                if meta["completion_tokens"] == 2:
                    await asyncio.Event().wait()

    state = two.run(backend=Slow(default="one two three"), stream=True)
    pieces = state.text_iter("a")
    text = ""
    while text != "one two":
        text += next(pieces)
    state.cancel()
    state.sync()
    (call,) = state.report().calls
    assert (call.prompt_tokens, call.generated_tokens, call.wasted_tokens) == (1, 2, 2)


@sgl.function
def two(s: Any) -> None:
    s += "x" + sgl.gen("a") + "y" + sgl.gen("b")


def test_limits() -> None:
    long = sgl.FakeBackend(default="one two three four five")
    state = two.options(limits=sgl.Limits(tokens=7)).run(backend=long)
    assert state["a"].split() == ["one", "two", "three", "four", "five"] and state["b"].split() == ["one", "two"]
    state = two.options(limits=sgl.Limits(tokens=5)).run(backend=long)
    with pytest.raises(sgl.LimitExceeded, match="5 tokens"):
        state["b"]
    state = two.options(limits=sgl.Limits(calls=1)).run(backend=long)
    with pytest.raises(sgl.LimitExceeded, match="1 calls"):
        state["b"]
    hung = vote.options(limits=sgl.Limits(seconds=0.05), retry=sgl.Retry(attempts=1))
    with pytest.raises(sgl.ProgramError, match="0.05 s"):
        hung.run("h", backend=Gated({"h": "1"}, held=("h",)))


def test_one_item_of_a_batch_fails_alone() -> None:
    @sgl.function
    def read(s: Any, q: str) -> str:
        s += q + sgl.gen("v")
        return str(s["v"])

    backend = Gated({"a": "1", "b": "FAIL", "c": "3"})
    states = read.run_batch([{"q": q} for q in "abc"], backend=backend)
    assert [s.ret_value for s in states] == ["1", None, "3"]
    with pytest.raises(KeyError, match="no luck"):
        states[1]["v"]


def test_a_batch_of_a_program_that_waits_for_an_answer_begins() -> None:
    turns: list[str] = []

    @sgl.function
    def guess(s: Any, secret: str) -> None:
        s += "Guess the word.\n"
        while True:
            turns.append(secret)
            s += sgl.gen("word") + "\n"
            if s["word"] == secret:
                return

    states = guess.run_batch([{"secret": "b"}] * 2, backend=sgl.FakeBackend({"": ["a", "b"]}))
    assert [s["word"] for s in states] == ["b", "b"] and len(turns) == 1 + 3
    with pytest.raises(sgl.ProgramError, match="does not end"):
        guess.trace(secret="b")


def test_a_program_that_goes_on_is_ended_again() -> None:
    ended: list[str] = []

    class Told(sgl.FakeBackend):
        def end_program(self, s: Any) -> None:
            ended.append(s.program.id)

    @sgl.function
    def talk(s: Any) -> None:
        s += "a" + sgl.gen("v")

    state = talk.run(backend=Told())
    state.sync()
    state += sgl.gen("w")
    assert state["w"] == "ok"
    state.sync()
    assert ended == [state._executor.program.id] * 2


def test_a_batch_needs_no_prefix() -> None:
    class Unable(sgl.FakeBackend):
        def cache_prefix(self, prefix_str: str) -> None:
            raise sgl.BackendError("no room", 503)

    @sgl.function
    def read(s: Any, q: str) -> None:
        s += "x" * 100 + q + sgl.gen("v")

    assert [s["v"] for s in read.run_batch([{"q": "a"}, {"q": "b"}], backend=Unable())] == ["ok", "ok"]


def test_a_bound_batch_leaves_the_callers_dicts_alone() -> None:
    given = [{"branches": "a"}]
    vote.bind().run_batch(given, backend=Gated({"a": "1"}))
    assert given == [{"branches": "a"}]


def test_options_that_are_also_arguments_go_to_both() -> None:
    @sgl.function
    def sample(s: Any, question: str, n: int) -> None:
        s += question + sgl.gen("v")
        s["n"] = n

    backend = sgl.FakeBackend()
    state = sample.run("q", n=3, backend=backend)
    assert state["n"] == 3 and state["v"] == ["ok"] * 3


def test_thousands_of_programs_on_one_thread() -> None:
    backend = Gated({"x": "1", "y": "2"})
    before = threading.active_count()

    @sgl.function
    async def slow(s: Any) -> str:
        s += "x" + sgl.gen("a")
        return str(await s.get("a"))

    async def everybody() -> list[Any]:
        return await asyncio.gather(*(slow.arun(backend=backend) for _ in range(2000)))

    states = asyncio.run(everybody())
    assert {s.ret_value for s in states} == {"1"}
    lazy = [two.run(backend=backend) for _ in range(2000)]
    assert {s["b"] for s in lazy} == {"2"}
    assert threading.active_count() <= before + 1


def test_coroutines() -> None:
    backend = sgl.FakeBackend({"x$": "one", "a$": "two", "b$": "three"})

    @sgl.function
    async def branching(s: Any) -> None:
        s += "x" + sgl.gen("first")
        forks = await s.afork(2)
        forks += lambda i: "ab"[i] + sgl.gen("v")
        await forks.ajoin()

    async def main() -> None:
        state = await branching.arun(backend=backend)
        assert state["v"] == ["two", "three"]
        streamed = await two.arun(backend=backend, stream=True)
        assert "".join([piece async for piece in streamed]) == "xoneyok"
        typed = [p async for p in (await two.arun(backend=backend, stream=True)).text_async_iter("a")]
        assert "".join(typed) == "one"

    asyncio.run(main())
    assert branching.run(backend=backend)["v"] == ["two", "three"]


def test_report() -> None:
    state = two.run(backend=sgl.FakeBackend(default="one two"))
    state.sync()
    report = state.report()
    assert report.total.calls == 2 and report.total.generated == 4
    text = str(report)
    assert text.startswith("two: ") and len(text.splitlines()) == 4 and text.splitlines()[2].startswith("two:")
    page = report.html()
    assert "s += &quot;x&quot; + sgl.gen" in page and page.count('class="call"') == 2
    data = json.loads(report.json())
    assert data["total"]["generated"] == 4 and data["calls"][1]["parent"] == "n0"
    assert data["lines"][0]["source"].startswith("s += ")


def test_drawing() -> None:
    @sgl.function
    def p(s: Any, q: str) -> None:
        s += "Start: " + q + sgl.gen("a")
        forks = s.fork(2)
        forks += sgl.gen("f")
        forks.join()
        s += sgl.select("c", ["x", "y"])

    assert p.trace().drawing().splitlines() == [
        "program",
        "├─ text 10 chars 'Start: {q}'",
        "├─ gen a",
        "├─ fork x2 sharing 10 chars",
        "│  ├─ branch 0",
        "│  │  └─ gen f",
        "│  └─ branch 1",
        "│     └─ gen f",
        "└─ select c of 2",
    ]


def test_a_coroutine_body_is_drawn_as_another() -> None:
    @sgl.function
    async def p(s: Any, q: str) -> str:
        s += "Start: " + q + sgl.gen("a")
        s += await s.get("a")
        assert (await s.settled()).error() is None and s.get_meta_info("a") is None
        forks = await s.afork(2)
        forks += sgl.gen("f")
        await asyncio.gather(*(fork.settled() for fork in forks))
        await forks.ajoin()
        s += sgl.select("c", ["x", "y"])
        return "".join([piece async for piece in s])

    drawn = [
        "program",
        "├─ text 10 chars 'Start: {q}'",
        "├─ gen a",
        "├─ variable a",
        "├─ fork x2 sharing 10 chars",
        "│  ├─ branch 0",
        "│  │  └─ gen f",
        "│  └─ branch 1",
        "│     └─ gen f",
        "└─ select c of 2",
    ]
    traced = p.trace()
    assert traced.drawing().splitlines() == drawn
    assert traced.ret_value == traced.text() == "Start: {q}{a}{a}{c}"

    async def on_a_loop() -> str:
        return p.trace().drawing()

    assert asyncio.run(on_a_loop()).splitlines() == drawn


def test_waiting_on_the_loop_of_the_programs_is_refused() -> None:
    backend = Gated({"x": "1", "y": "2"})

    @sgl.function
    def blocking(s: Any) -> None:
        s += "x" + sgl.gen("a")
        s["a"]

    async def on_the_loop() -> None:
        blocking.run(backend=backend)

    from bough.lang.waiting import default_loop

    with pytest.raises(RuntimeError, match="await s.get"):
        asyncio.run_coroutine_threadsafe(on_the_loop(), default_loop()).result(10)
