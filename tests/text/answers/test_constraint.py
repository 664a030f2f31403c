"""What a family's description allows is what its models write: grammars accept written calls and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.text.reasoning.families import BY_NAME as REASONING
from bough.text.tools.constraint import CallGrammar
from bough.text.tools.families import BY_NAME, FAMILIES
from bough.text.tools.format import Family
from bough.text.tools.writer import write_calls

from .golden import TOOLS, Calls
from .test_tools import NAMES, PER_FAMILY, some_calls

llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
ORDER = list(TOOLS["get_weather"]["properties"])


def accepted(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def grammar_of(family: Family, *, parallel: bool = True, tools: Any = TOOLS, thinking: Any = None) -> str:
    return CallGrammar(family, {}).constraint(tools, parallel=parallel, thinking=thinking).text


@pytest.mark.parametrize("name", NAMES)
def test_written_calls_are_accepted(name: str) -> None:
    family = BY_NAME[name]
    many, one = grammar_of(family), grammar_of(family, parallel=False)

    @PER_FAMILY
    @given(calls=some_calls())
    def check(calls: Calls) -> None:
        own = [t.strip() for form in family.formats for t in form.literals if "<" in t or "`" in t or "[" in t]
        if any(mark in a.get("city", "") for _, a in calls for mark in own):
            return
        # Arguments come in the order of the schema, and objects have what it names.
        ordered = [(n, {k: a[k] for k in ORDER if k in a and k not in ("note", "where")}) for n, a in calls]
        text = write_calls(family, ordered)
        assert accepted(many, text), text
        assert accepted(one, text) == (len(calls) == 1)

    check()


@pytest.mark.parametrize("name", NAMES)
def test_anything_else_is_not(name: str) -> None:
    family = BY_NAME[name]
    grammar = grammar_of(family)
    for calls in ([("rm_rf", {})], [("get_weather", {})], [("get_weather", {"city": "x", "days": 1.5})],
                  [("get_weather", {"city": "x", "more": 1})], [("get_time", {"zone": "x"})]):  # fmt: skip
        assert not accepted(grammar, write_calls(family, calls)), calls
    whole = write_calls(family, [("get_weather", {"city": "x"})])
    assert accepted(grammar, whole) and not accepted(grammar, whole[:-1]) and not accepted(grammar, "So: " + whole)


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "magistral"])
def test_reasoning_may_come_first(name: str) -> None:
    family, thinking = BY_NAME["gpt-oss" if name == "gpt-oss" else "hermes"], REASONING[name]
    grammar = grammar_of(family, thinking=thinking)
    call = write_calls(family, [("get_time", {})])
    between = "<|start|>assistant" if thinking.channels else "\n\n"
    assert accepted(grammar, f"{thinking.opens}\nhm\n{thinking.closes}{between}{call}")
    assert accepted(grammar, call) and not accepted(grammar, f"{thinking.opens}\nhm\n{call}")


def test_json_may_stand_in_place_of_calls() -> None:
    asked = Constraint(kind="json_schema", text='{"type": "object", "properties": {"x": {"type": "integer"}}}')
    for family in (BY_NAME["hermes"], BY_NAME["json"], BY_NAME["pythonic"]):
        grammar = CallGrammar(family, {}).constraint(TOOLS, parallel=True, otherwise=asked).text
        assert accepted(grammar, '{"x": 3}') and accepted(grammar, write_calls(family, [("get_time", {})]))
        assert not accepted(grammar, '{"x": "3"}') and not accepted(grammar, "x")


def test_json_beside_calls_of_channels_is_on_its_own() -> None:
    asked, thinking = Constraint(kind="json_object"), REASONING["gpt-oss"]
    grammar = CallGrammar(BY_NAME["gpt-oss"], {}).constraint(TOOLS, parallel=True, thinking=thinking, otherwise=asked)
    answer, call = '<|channel|>final<|message|>{"x": 3}', write_calls(BY_NAME["gpt-oss"], [("get_time", {})])
    for said in (answer, call):
        assert accepted(grammar.text, said)
        assert accepted(grammar.text, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{said}")
    assert not accepted(grammar.text, '{"x": 3}')


def test_special_tokens_are_named_by_their_ids() -> None:
    special = {"<|tool_calls_section_begin|>": 7, "<|tool_calls_section_end|>": 8, "<|tool_call_begin|>": 9}
    text = CallGrammar(BY_NAME["kimi-k2"], special).constraint(TOOLS, parallel=True).text
    assert text.splitlines()[1] == "start: <[7]> call ( call)* <[8]>"
    assert '<[9]> "functions." "get_time" ":" /[0-9]+/ "<|tool_call_argument_begin|>"' in text


def test_strict_tools_as_structural_tags() -> None:
    for family in FAMILIES:
        constraint = CallGrammar(family, {}).tags(TOOLS, parallel=False)
        if not family.formats[0].trigger:
            assert constraint.kind == "grammar"
            continue
        assert constraint.kind == "structural_tag"
        tags = json.loads(constraint.text)
        assert tags["stop_after_first"] is True
        for structure in tags["structures"]:
            assert structure["begin"].startswith(tags["triggers"][0]) and ("schema" in structure) != (
                "grammar" in structure
            )
            if "grammar" in structure:
                assert not llguidance.LLMatcher(BYTES, structure["grammar"]).is_error()


def test_references_reach_the_arguments() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"],
              "$defs": {"n": {"type": "integer", "minimum": 3}}}  # fmt: skip
    for name in ("qwen3-coder", "pythonic", "hermes"):
        grammar = grammar_of(BY_NAME[name], tools={"f": schema})
        assert accepted(grammar, write_calls(BY_NAME[name], [("f", {"a": 3})]))
        assert not accepted(grammar, write_calls(BY_NAME[name], [("f", {"a": 2})]))


KEYWORDS = ["functiongemma", "gemma-4", "pythonic", "gemma-3"]


@pytest.mark.parametrize("name", KEYWORDS)
@pytest.mark.parametrize("required", ["", "a", "b", "c", "bc", "abc"])
def test_optional_arguments_may_be_left_out(name: str, required: str) -> None:
    schema = {"type": "object", "properties": {k: {"type": "integer"} for k in "abc"}, "required": [*required]}
    grammar = grammar_of(BY_NAME[name], tools={"f": schema}, parallel=False)
    for left in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        text = write_calls(BY_NAME[name], [("f", dict.fromkeys(left, 1))])
        assert accepted(grammar, text) == (set(required) <= set(left)), left


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_grammar_is_linear_in_its_arguments(name: str) -> None:
    def of(n: int) -> str:
        named = {f"p{i:03}": {"type": "integer"} for i in range(n)}
        return grammar_of(BY_NAME[name], tools={"f": {"type": "object", "properties": named}}, parallel=False)

    assert len(of(800)) < 10 * len(of(100))
    text = write_calls(BY_NAME[name], [("f", {f"p{i:03}": 1 for i in range(3, 60, 7)})])
    assert accepted(of(60), text)


@pytest.mark.parametrize("name", ["glm-4.5", "qwen3-coder", "minimax-m2", "functiongemma", "gemma-4", "pythonic"])
def test_what_many_arguments_refer_to_is_written_once(name: str) -> None:
    big = {"enum": [f"v{i}v" for i in range(1000)]}
    spec = {"$ref": "#/$defs/big", "description": "of many"}
    schema = {"type": "object", "properties": {f"p{i}": spec for i in range(200)}, "$defs": {"big": big}}
    grammar = grammar_of(BY_NAME[name], tools={"f": schema}, parallel=False)
    assert grammar.count("v999v") == 1
    several = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/big"}, {"const": f"{i}"}]} for i in range(200)}
    with pytest.raises(InvalidRequest, match="more than 262144 characters"):
        grammar_of(BY_NAME[name], tools={"f": {**schema, "properties": several}})


def test_definitions_of_one_tool_are_not_those_of_another() -> None:
    def tool(value: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"d": {"const": value}}}

    for name in ("qwen3-coder", "pythonic"):
        grammar = grammar_of(BY_NAME[name], tools={"f": tool("x"), "g": tool("y")}, parallel=False)
        assert accepted(grammar, write_calls(BY_NAME[name], [("g", {"a": "y"})]))
        assert not accepted(grammar, write_calls(BY_NAME[name], [("g", {"a": "x"})]))
