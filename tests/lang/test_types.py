"""Typed answers: values, validation, asking again, and what can be told of them while they are written."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from typing import Any, Literal, TypedDict

import msgspec
import pydantic
import pytest

import bough as sgl
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


@dataclasses.dataclass
class Country:
    capital: City
    others: list[City]


@dataclasses.dataclass
class Tree:
    value: int
    children: list[Tree]


class Separator(enum.Enum):
    COMMA = ", "
    NONE = ""


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
        (list[City], '[{"name": "Oslo", "population": 7}]', [City(name="Oslo", population=7)]),
        (City | None, '{"name": "Oslo", "population": 7}', City(name="Oslo", population=7)),
        (dict[str, City], '{"a": {"name": "Oslo", "population": 7}}', {"a": City(name="Oslo", population=7)}),
        (
            Country,
            '{"capital": {"name": "Oslo", "population": 7}, "others": []}',
            Country(City(name="Oslo", population=7), []),
        ),
        (Tree, '{"value": 1, "children": [{"value": 2, "children": []}]}', Tree(1, [Tree(2, [])])),
        (Person | Tree, '{"value": 1, "children": []}', Tree(1, [])),
        (list[Person | Tree], '[{"name": "A", "age": 1}]', [Person("A", 1)]),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (Separator, ", ", Separator.COMMA),
        (Literal[" yes", "no"], " yes", " yes"),
        ({"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}, '{"a": 1}', {"a": 1}),
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


@pytest.mark.parametrize(
    ("wanted", "written", "value"),
    [
        (list[City], '[{"name": "Os', ["Os"]),
        (Tree, '{"value": 1, "children": [{"value": 2', 1),
        ({"type": "object"}, '{"a": "b', {"a": "b"}),
    ],
)
def test_the_beginning_of_an_answer_of_any_type(wanted: Any, written: str, value: Any) -> None:
    found = Answer(wanted).partial(written)
    if isinstance(found, list):
        found = [city.name for city in found]
    assert getattr(found, "value", found) == value


def test_a_type_without_a_schema_is_refused() -> None:
    class Holder(pydantic.BaseModel):
        model_config = {"arbitrary_types_allowed": True}
        what: Signal

    with pytest.raises(TypeError):
        Answer(Holder)


def test_each_of_several_answers_is_validated() -> None:
    backend = sgl.FakeBackend({"Q:$": "7", "valid": "8"})
    state = ask.run(int, n=2, validate=lambda value: value == 8, reask=1, backend=backend)
    assert state["a"] == [8, 8]


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
