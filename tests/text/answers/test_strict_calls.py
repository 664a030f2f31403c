"""Grammars of calls hold arguments to their schemas, in whatever form a family writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from bough.base.errors import InvalidRequest
from bough.grammar.composed import grammar_of_tags
from bough.text.events import CallArguments
from bough.text.reasoning.families import BY_NAME as REASONING
from bough.text.tools.constraint import LENIENT, CallGrammar
from bough.text.tools.families import BY_NAME
from bough.text.tools.parser import ToolParser
from bough.text.tools.schema import Unwritable, whole
from bough.text.tools.writer import write_calls

from .test_constraint import BYTES, accepted, llguidance
from .test_tools import NAMES

BARE = ("json", "llama3-json", "pythonic")
TEXTUAL = ("qwen3-coder", "glm-4.5", "minimax-m2")
WRITTEN = (*TEXTUAL, "functiongemma", "gemma-4")

DEFS = {
    "Color": {"type": "string", "enum": ["red", "blue"]},
    "Size": {"enum": [1, 2], "type": "integer"},
    "Both": {"anyOf": [{"$ref": "#/$defs/Color"}, {"$ref": "#/$defs/Size"}]},
}
ARGUMENTS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"$ref": "#/$defs/Color"}, ["red", "blue"], ["purple", "re", ""]),
    ({"$ref": "#/$defs/Both"}, ["red", 2], ["purple", 3]),
    ({"allOf": [{"$ref": "#/$defs/Color"}], "description": "of the wall"}, ["red"], ["purple"]),
    ({"anyOf": [{"enum": ["c", "f"], "type": "string"}, {"type": "null"}], "default": None}, ["c", None], ["k", 3]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["c", None], []),
    ({"const": "fixed"}, ["fixed"], ["other"]),
    ({"enum": ["red", 1, None]}, ["red", 1, None], ["x", 2]),
    ({"type": "string", "pattern": "^[0-9]{5}$"}, ["12345"], ["not a zip", "123456", "1234"]),
    ({"type": "string", "pattern": "b+|^c/d$"}, ["abba", "c/d"], ["ac/d", "x"]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["soon", "2023-02-29x"]),
    ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"type": "string", "format": "email"}, ["me.too@x-y.org"], ["me", "a@-b"]),
    ({"type": "string", "format": "uri"}, ["https://x.org:80/a%20b?c=d#e"], ["x.org", "https://x.org/ y"]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü"], ["a", "abcd"]),
    ({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 3}]}, ["ab", 4], ["a", 2]),
    ({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}, ["a", [1, 2]], [["a"]]),
    ({"type": ["string", "integer"], "enum": ["red", 1]}, ["red", 1], ["x", 2]),
    ({"type": "boolean", "const": True}, [], [False]),
    ({"type": "integer", "minimum": 3}, [3], [2]),
]


def schema_of(argument: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": argument}, "required": ["a"], "additionalProperties": False,
            "$defs": DEFS}  # fmt: skip


def grammar_of(name: str, schema: Any) -> str:
    return CallGrammar(BY_NAME[name], {}).constraint({"f": schema}, parallel=False).text


def read(name: str, text: str, schema: Any) -> Any:
    parser = ToolParser(BY_NAME[name], {"f": schema})
    events = [*parser.push(text), *parser.finish()]
    return json.loads("".join(event.text for event in events if isinstance(event, CallArguments)))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_keep_to_their_schemas(name: str) -> None:
    for argument, good, bad in ARGUMENTS:
        schema = schema_of(argument)
        grammar = grammar_of(name, schema)
        for value in good:
            text = write_calls(BY_NAME[name], [("f", {"a": value})])
            if name in ("pythonic", "gemma-3"):
                text = text.replace("=None", "=null")
            assert accepted(grammar, text), (argument, text)
            assert read(name, text, schema) == {"a": value}
        for value in bad:
            assert not accepted(grammar, write_calls(BY_NAME[name], [("f", {"a": value})])), (argument, value)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_behind_references(name: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for schema in ({"$ref": "#/$defs/A", "$defs": {"A": inner}}, {"allOf": [inner]}):
        grammar = grammar_of(name, schema)
        assert accepted(grammar, write_calls(BY_NAME[name], [("f", {"a": 1})]))
        assert not accepted(grammar, write_calls(BY_NAME[name], [("f", {})]))


@pytest.mark.parametrize("name", [*WRITTEN, "pythonic", "gemma-3"])
@pytest.mark.parametrize(("more", "keyword"), [
    ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "anyOf"),
    ({"minProperties": 1}, "minProperties"),
    ({"required": ["a", "c"]}, "required"),
    ({"additionalProperties": {"type": "integer"}}, "additionalProperties"),
    ({"not": {"required": ["a"]}}, "not"),
    ({"$ref": "#"}, r"\$ref"),
])  # fmt: skip
def test_what_arguments_by_themselves_cannot_keep_is_refused(name: str, more: dict[str, Any], keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, **more}
    with pytest.raises(InvalidRequest, match=f"{keyword} in the parameters of f"):
        grammar_of(name, schema)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(("argument", "keyword"), [
    ({"type": "string", "not": {"const": "x"}}, "not"),
    ({"type": "string", "format": "color"}, "format"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
    ({"type": "string", "if": {"const": "x"}}, "if"),
    ({"oneOf": [{"type": "string", "minLength": 3}, {"type": "string", "pattern": "a"}]}, "oneOf"),
    ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, "allOf"),
])  # fmt: skip
def test_what_texts_cannot_keep_is_refused(name: str, argument: dict[str, Any], keyword: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{keyword} in the parameters of f"):
        grammar_of(name, schema_of(argument))


@pytest.mark.parametrize("name", TEXTUAL)
def test_texts_that_would_be_read_as_other_values(name: str) -> None:
    with pytest.raises(InvalidRequest, match="enum"):
        grammar_of(name, schema_of({"enum": [1, "2"]}))
    with pytest.raises(InvalidRequest, match="enum"):
        grammar_of(name, schema_of({"enum": [f"x{end_of(name)}y"]}))
    either = schema_of({"anyOf": [{"type": "string", "pattern": "[0-9]"}, {"type": "integer", "minimum": 3}]})
    assert not accepted(grammar_of(name, either), write_calls(BY_NAME[name], [("f", {"a": "2"})]))
    assert accepted(grammar_of(name, either), write_calls(BY_NAME[name], [("f", {"a": "2 to 4"})]))


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("argument", [
    {"type": "string", "maxLength": 1000}, {"type": "string", "minLength": 100, "maxLength": 5000},
    {"type": ["string", "integer"], "maxLength": 1000}, {"type": "string", "pattern": "x[a-z ]+", "maxLength": 1000},
])  # fmt: skip
def test_long_texts_may_end_early(name: str, argument: dict[str, Any]) -> None:
    schema = schema_of(argument)
    call = write_calls(BY_NAME[name], [("f", {"a": "x words " * 20})])
    assert accepted(grammar_of(name, schema), call)
    tags = CallGrammar(BY_NAME[name], {}).tags({"f": schema}, parallel=True)
    assert accepted(grammar_of_tags(tags, {}, {}), f"So: {call}")


def end_of(name: str) -> str:
    return {"glm-4.5": "</arg_value>"}.get(name, "</parameter>")


@pytest.mark.parametrize(("pattern", "texts"), [
    ("^a", ["a", "ab"]), ("a$", ["ba"]), ("^a|b$", ["ac", "cb"]), ("", ["", "x"]), ("^(a|b)$", ["a"]), (r"\$$", ["1$"]),
    (r"^[\d/[&]+$", ["1/[&"]), (r"^\w+@\w+\.(com|org)$", ["me@x.org"]), ("^.$", ["é", "\n"]), ("(a)", ["bab"]),
    (r"^\u0041\<$", ["A<"]), ("^[^^]$", ["^", "b"]), ("a{2,3}", ["a", "baab"]),
])  # fmt: skip
def test_patterns_as_whole_texts(pattern: str, texts: list[str]) -> None:
    grammar = f"%llguidance {{}}\nstart: T\nT: /{whole(pattern)}/"
    for text in [*texts, "a", "c", "1", "zz/"]:
        assert accepted(grammar, text) == (re.search(pattern, text) is not None), text


@pytest.mark.parametrize("pattern", [r"(?!a)b", r"(a)\1", r"\bword\b", "(^a)", "a^b", "[]", 3])
def test_patterns_beyond_regular_expressions(pattern: Any) -> None:
    with pytest.raises(Unwritable):
        whole(pattern)


def test_texts_before_special_tokens() -> None:
    # Bytes that no text has.
    special = {"<arg_key>": 0xF8, "</arg_key>": 0xF9, "<arg_value>": 0xFA, "</arg_value>": 0xFB}
    schema = schema_of({"anyOf": [{"type": "string", "minLength": 2}, {"type": "integer", "minimum": 3}]})
    grammar = CallGrammar(BY_NAME["glm-4.5"], special).constraint({"f": schema}, parallel=False).text
    for value, good in (("ab", True), ("4", True), ("a", False), ("2", False), ("a</arg_value>", False)):
        matcher = llguidance.LLMatcher(BYTES, grammar)
        tokens = [*b"<tool_call>f\n", 0xF8, *b"a", 0xF9, *b"\n", 0xFA, *value.encode(), 0xFB, *b"\n</tool_call>"]
        assert (matcher.validate_tokens(tokens) == len(tokens)) == good, value


@pytest.mark.parametrize("name", BARE)
def test_calls_without_a_mark_or_text(name: str) -> None:
    family, schema = BY_NAME[name], schema_of({"type": "string", "enum": ["x"]})
    grammar = CallGrammar(family, {}).tags({"f": schema}, parallel=True, thinking=REASONING["qwen3"]).text
    assert not llguidance.LLMatcher(BYTES, grammar).is_error()
    call, wrong = (write_calls(family, [("f", {"a": value})]) for value in ("x", "y"))
    for text in (call, "Hello, [f] {f}\n", "", f"<think>\nhm\n</think>\n\n{call}", "<think>\n[\n</think>\n\nHello"):
        assert accepted(grammar, text), text
    marks = [f"{mark}{wrong}" for mark in family.triggers]
    for text in (wrong, f" {wrong}", *marks, *(f"So: {mark}" for mark in marks), f"<think>\n</think>\n\n{wrong}"):
        assert not accepted(grammar, text), text


BEYOND: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2], [1, 1]], [["x"]]),
    ({"type": "string", "format": "of our own"}, ["x"], []),
    ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}, [2, 9], []),
]
"""What no grammar can hold arguments to, beside what it can."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("argument", "right", "wrong"), BEYOND)
def test_tools_that_are_not_strict_are_held_to_what_can_be(
    name: str, argument: Any, right: list[Any], wrong: list[Any]
) -> None:
    family = BY_NAME[name]
    schema = schema_of(argument)
    try:
        strict = CallGrammar(family, {}).constraint({"f": schema}, parallel=False).text
        assert llguidance.LLMatcher(BYTES, strict).is_error()
    except InvalidRequest:
        pass
    tools = {"f": schema | LENIENT, "g": schema_of({"type": "integer"})}
    grammar = CallGrammar(family, {}).constraint(tools, parallel=False).text
    for value in right:
        assert accepted(grammar, write_calls(family, [("f", {"a": value})])), value
    for value in wrong:
        assert not accepted(grammar, write_calls(family, [("f", {"a": value})])), value
    assert not accepted(grammar, write_calls(family, [("f", {"b": 1})]))
    assert not accepted(grammar, write_calls(family, [("g", {"a": "x"})]))
    tags = CallGrammar(family, {}).tags(tools, parallel=False)
    if tags.kind == "structural_tag":
        assert not llguidance.LLMatcher(BYTES, grammar_of_tags(tags, {}, {})).is_error()
