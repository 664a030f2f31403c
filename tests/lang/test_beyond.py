"""What the language does beyond SGLang's: types, tools, limits, retries, cancellation, records, reports, joins."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
import re
import threading
from pathlib import Path
from typing import Any, Literal, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bough as sgl
from bough.lang.backends.base import AsyncBackend
from bough.lang.types import Answer, partial_json
from bough.lang.waiting import Signal


@dataclasses.dataclass
class Person:
    name: str
    age: int


class City(pydantic.BaseModel):
    name: str
    population: int = pydantic.Field(ge=0)


class Point(TypedDict):
    x: int
    y: int


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(msgspec.Struct):
    tags: list[str]
    owner: Person | None = None


@sgl.function
def ask(s: Any, wanted: Any, **options: Any) -> None:
    s += "Q:" + sgl.gen("a", type=wanted, **options)


@pytest.mark.parametrize(
    ("wanted", "written", "value"),
    [
        (int, "42", 42),
        (float, "-1.5", -1.5),
        (bool, "true", True),
        (str, "free text", "free text"),
        (Colour, "blue", Colour.BLUE),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Person, '{"name": "Ada", "age": 36}', Person("Ada", 36)),
        (City, '{"name": "Oslo", "population": 7}', City(name="Oslo", population=7)),
        (Point, '{"x": 1, "y": 2}', {"x": 1, "y": 2}),
        (list[int], "[1, 2]", [1, 2]),
        (list[Person], '[{"name": "A", "age": 1}]', [Person("A", 1)]),
        (Leaf, '{"tags": ["x"], "owner": null}', Leaf(["x"])),
    ],
)
def test_typed_values(wanted: Any, written: str, value: Any) -> None:
    backend = sgl.FakeBackend({"Q:": written})
    state = ask.run(wanted, backend=backend)
    assert state["a"] == value and type(state["a"]) is type(value)
    assert state.text() == "Q:" + written
    params = backend.calls[0].params
    assert params is not None
    if wanted is not str:
        assert (params.regex is None) != (params.json_schema is None)
    if params.regex is not None:
        assert re.fullmatch(params.regex, written)
    # What is not given is made to fit the constraint.
    ask.run(wanted, backend=sgl.FakeBackend())["a"]


def test_objects_are_closed() -> None:
    schema = json.loads(Answer(Leaf).json_schema or "")
    assert all(d["additionalProperties"] is False for d in schema["$defs"].values())


def test_a_wrong_answer_names_the_call() -> None:
    state = ask.run(int, backend=sgl.FakeBackend({"Q:": "many"}))
    with pytest.raises(sgl.InvalidAnswer, match="'many'") as caught:
        state["a"]
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)


def test_reask_tells_what_is_wrong_and_leaves_no_trace() -> None:
    backend = sgl.FakeBackend({"Q:": ["many", "-3", "3"]})

    def positive(value: int) -> None:
        if value < 0:
            raise ValueError("it must not be negative")

    state = ask.run(int, reask=2, validate=positive, backend=backend)
    assert state["a"] == 3 and state.text() == "Q:3"
    first, second, third = (call.prompt for call in backend.calls)
    assert first == "Q:" and second.startswith("Q:many\n") and "negative" in third
    assert state.report().total.wasted == 2
    gone = ask.run(int, reask=1, validate=positive, backend=sgl.FakeBackend({"Q:": "-3"}))
    with pytest.raises(sgl.InvalidAnswer, match="negative"):
        gone["a"]


def test_reask_in_a_conversation_is_a_turn() -> None:
    backend = sgl.FakeBackend([("user", ["x", "5"])], chat_template="chatml")

    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.user("number?")
        s += sgl.assistant(sgl.gen("n", type=int, reask=1))

    state = chat.run(backend=backend)
    assert state["n"] == 5
    assert [m["content"] for m in state.messages()] == ["number?", "5"]
    assert backend.calls[1].prompt.count("<|im_start|>user") == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1', {}),
        ('{"a": 1,', {"a": 1}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": [1, 2', {"a": [1]}),
        ('{"a": [1, 2]', {"a": [1, 2]}),
        ('{"a": {"b": tru', {"a": {}}),
        ('{"a": "\\u00', {"a": ""}),
        ('{"a": "x", "b', {"a": "x"}),
        ("[", []),
        ("{}", {}),
    ],
)
def test_partial_json(text: str, value: Any) -> None:
    assert partial_json(text) == value


def test_the_beginning_of_a_character_is_no_character() -> None:
    for shown in (r"a\ud83d\ude00b\"\\u12", r"\\\ud83d\ude00\u00e9"):
        text = f'["{shown}"]'
        whole = json.loads(text)[0]
        for end in range(2, len(text) + 1):
            (found,) = partial_json(text[:end])
            assert whole.startswith(found), text[:end]
            found.encode()


def test_partial_values_grow_to_the_value() -> None:
    backend = sgl.FakeBackend({"Q:": '{"name": "Ada Byron", "age": 36}'})
    state = ask.run(Person, backend=backend, stream=True)
    seen = list(state.partial_iter("a"))
    assert seen[-1] == Person("Ada Byron", 36)
    assert [(p.name, p.age) for p in seen[:-1]] == [
        (None, None), ("Ada", None), ("Ada Byron", None), ("Ada Byron", 36),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_whoever_follows_while_it_is_asked_again_sees_what_stays(stream: bool) -> None:
    class Held(sgl.FakeBackend):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            if len(self.calls) == 1:  # one answer has been rejected
                asked.set()
                await followed.reached()
            return await super().agenerate(s, sampling_params)

    @sgl.function
    def program(s: Any) -> None:
        s += "q1" + sgl.gen("a", type=int, reask=2) + "q2" + sgl.gen("b")

    asked, followed = Signal(), Signal()
    backend = Held({"q1": ["bad", "bad", "7"], "valid": ["worse", "7"], "q2": " one two three"})
    state = program.run(backend=backend, stream=stream)
    asked.wait()
    following = state.text_iter()
    pieces = [next(following)] if stream else []
    followed.set()
    assert "".join([*pieces, *following]) == state.text() == "q17q2 one two three"
    assert list(state.partial_iter("a"))[-1] == 7
    assert list(state.partial_iter("b"))[-1] == " one two three"


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


def test_wrong_arguments_are_told_to_the_model() -> None:
    steps = ['{"tool": "add", "arguments": {"a": "x"}}', '{"tool": "answer", "arguments": {"answer": 0}}']
    state = agent.run("?", backend=sgl.FakeBackend({"ASSISTANT:$": steps}))
    assert state["answer"] == 0 and "ValidationError" in state.messages()[3]["content"]


class Gated(AsyncBackend):
    """Answers the branch that it is told to, counts who is stopped."""

    def __init__(self, answers: dict[str, str], held: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.answers, self.held = answers, held
        self.stopped: list[str] = []
        self.running = 0
        self.most = 0

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        key = s.text_[-1]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if key in self.held:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.stopped.append(key)
            raise
        finally:
            self.running -= 1
        if self.answers[key] == "FAIL":
            raise RuntimeError("no luck")
        return self.answers[key], {"completion_tokens": 1, "prompt_tokens": 4, "cached_tokens": 3}


@sgl.function
def vote(s: Any, branches: str, **how: Any) -> Any:
    s += "x"
    forks = s.fork(len(branches))
    for fork, branch in zip(forks, branches):
        fork += branch + sgl.gen("v")
    return forks.join(**how)


def test_join_first_valid_stops_the_others() -> None:
    backend = Gated({"a": "bad", "b": "good", "c": "FAIL"}, held=("d", "e"))
    state = vote.run("acbde", mode="first_valid", name="v", valid=lambda v: v == "good", backend=backend)
    assert state["v"] == "good" and state.ret_value == [2]
    assert sorted(backend.stopped) == ["d", "e"]
    assert state.report().total.wasted == 1  # of "bad"


def test_join_majority_stops_when_it_is_decided() -> None:
    backend = Gated({"a": "1", "b": "2", "c": " 1", "d": "1"}, held=("e",))
    state = vote.run("abcde", mode="majority", name="v", key=str.strip, backend=backend)
    assert state["v"].strip() == "1" and state.ret_value == [0, 2, 3]
    split = vote.run("ab", mode="majority", name="v", backend=Gated({"a": "1", "b": "2"}))
    assert split["v"] in ("1", "2")


def test_join_predicate_gathers_from_the_finished() -> None:
    backend = Gated({"a": "1", "b": "2"}, held=("c",))
    state = vote.run("abc", mode="predicate", until=lambda done: len(done) == 2, backend=backend)
    assert state["v"] == ["1", "2"]


def test_join_needs_the_variable_that_it_is_of() -> None:
    for mode in ("first_valid", "majority"):
        with pytest.raises(sgl.ProgramError, match="none has the variable 'typo'"):
            vote.run("ab", mode=mode, name="typo", backend=Gated({"a": "1", "b": "2"}))
    with pytest.raises(ValueError, match="needs the name"):
        vote.run("ab", mode="majority", backend=Gated({"a": "1", "b": "1"}))


def test_join_takes_all_that_was_asked_of_the_winner() -> None:
    @sgl.function
    def both(s: Any, **how: Any) -> Any:
        s += "x"
        forks = s.fork(2)
        forks += lambda i: "ab"[i] + sgl.gen("v")
        forks += lambda i: "cd"[i] + sgl.gen("w")
        return forks.join(**how)

    answers = {"a": "1", "b": "1", "c": "2", "d": "2"}
    state = both.run(mode="first_valid", name="v", backend=Gated(answers, held=("b",)))
    assert state.ret_value == [0] and state["v"] == "1" and "w" in state and state["w"] == "2"
    with pytest.raises(sgl.ProgramError, match="no luck"):
        both.run(mode="first_valid", name="v", backend=Gated(answers | {"c": "FAIL", "d": "FAIL"}))


def test_what_decides_a_join_may_give_anything_and_fail() -> None:
    backend = Gated({"a": "1", "b": "2", "c": "1"})
    assert vote.run("abc", mode="majority", name="v", key=lambda v: [v], backend=backend).ret_value == [0, 2]

    def fails(value: Any) -> Any:
        raise LookupError("no way")

    for how in ({"mode": "first_valid", "valid": fails}, {"mode": "majority", "key": fails}):
        backend = Gated({"a": "1"}, held=("b",))

        @sgl.function
        def voting(s: Any, how: Any) -> None:
            s += "x"
            forks = s.fork(2)
            forks += lambda i: "ab"[i] + sgl.gen("v")
            with pytest.raises(LookupError, match="no way"):
                forks.join(name="v", **how)
            forks[1].sync()

        voting.run(how, backend=backend)
        assert backend.stopped == ["b"]


def test_join_says_when_nobody_will_do() -> None:
    with pytest.raises(sgl.ProgramError, match="no luck"):
        vote.run("aa", mode="first_valid", name="v", backend=Gated({"a": "FAIL"}))
    with pytest.raises(sgl.ProgramError, match="state 1 of the fork.*no luck"):
        vote.run("ba", backend=Gated({"a": "FAIL", "b": "1"}))
    with pytest.raises(sgl.ProgramError, match="to be joined.*no luck"):
        vote.run("ba", mode="concate_and_append", backend=Gated({"a": "FAIL", "b": "1"}))


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


def test_record_and_replay(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    model = sgl.FakeBackend({"x$": ["one", "uno"], "y$": "two", "z$": "yes"}, chat_template="chatml")

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("x" + sgl.gen("a")) + "y" + sgl.gen("b", type=str) + "z" + sgl.select("c", ["no", "yes"])

    said = program.run(backend=sgl.record(path, model))
    said.sync()
    again = program.run(backend=sgl.replay(path))
    assert again.text() == said.text() and again["c"] == "yes"
    with pytest.raises(sgl.ProgramError, match="no answer to this call behind 'x'"):
        two.run(backend=sgl.replay(path))["a"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_recording_is_the_same_for_streams(tmp_path: Path, recorded: bool, replayed: bool) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a") + "y" + sgl.gen("b", type=int)

    path, model = tmp_path / "talk.jsonl", sgl.FakeBackend({"x$": "one two three", "y$": "4"})
    said = program.run(backend=sgl.record(path, model), stream=recorded)
    said.sync()
    again = program.run(backend=sgl.replay(path), stream=replayed)
    assert again.text() == said.text() and again["b"] == 4
    if replayed:
        pieces = [piece for piece, _ in again.stream_executor.pieces["a"]]
        assert pieces == (["one", " two", " three"] if recorded else ["one two three"])
    assert again.get_meta_info("a") == said.get_meta_info("a")
    assert again.report().total.generated == said.report().total.generated == 4


def test_recordings_hold_any_text(tmp_path: Path) -> None:
    path, said = tmp_path / "talk.jsonl", "one\u2028two\x85\u2029 \ud83d end\r\n\\"
    two.run(backend=sgl.record(path, sgl.FakeBackend({"x$": said, "y$": "ok"}))).sync()
    path.read_text(encoding="utf-8")
    assert two.run(backend=sgl.replay(path))["a"] == said


def test_a_recording_answers_as_often_as_it_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    backend = sgl.record(path, sgl.FakeBackend({"x$": ["1", "2"], "y$": "ok"}))
    assert [two.run(backend=backend)["a"] for _ in range(2)] == ["1", "2"]
    again = sgl.replay(path)
    assert [two.run(backend=again)["a"] for _ in range(2)] == ["1", "2"]
    with pytest.raises(sgl.ProgramError, match="no answer to this call behind 'x'"):
        two.run(backend=again)["a"]


def test_a_recording_that_was_cut_says_where(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    two.run(backend=sgl.record(path, sgl.FakeBackend())).sync()
    whole = path.read_bytes()
    wrong = {b"": 1, whole[:20]: 1, whole[:-20]: 3, whole + b"[]\n": 4, whole + b"\xff\n": 4, whole + b"{}\n": 4}
    for data, line in wrong.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"talk.jsonl, line {line}: it is"):
            sgl.replay(path)


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
