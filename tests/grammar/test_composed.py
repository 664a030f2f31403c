"""Formats of structural tags: what each lets through, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.grammar.admission import check_constraint
from bough.grammar.composed import grammar_of_tags

BYTES = llguidance.LLTokenizer("byte")
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
OPEN, CLOSE = 0xF8, 0xF9
"""Special tokens: bytes that no text has."""
SPECIAL = {"<|open|>": OPEN, "<|close|>": CLOSE}

Format = dict[str, Any]


def grammar_of(form: Format) -> str:
    constraint = Constraint(kind="structural_tag", text=json.dumps({"format": form}))
    check_constraint(constraint, DEFAULT_LIMITS)
    return grammar_of_tags(constraint, SPECIAL, SPACING)


def accepted(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode().replace(b"<|open|>", bytes([OPEN])).replace(b"<|close|>", bytes([CLOSE])))
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def const(value: str) -> Format:
    return {"type": "const_string", "value": value}


def json_of(schema: Any) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def regex(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def tag(begin: Any, content: Format, end: Any) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


ANY: Format = {"type": "any_text"}
INT = json_of({"type": "integer"})
TAGS = [tag("<f=a>", INT, "</f>"), tag("<f=b>", json_of({"enum": ["x"]}), "</f>")]
CALLS: Format = {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}
LIST: Format = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}
RULES: Format = {"type": "dispatch", "rules": [["<a>", const("1")], ["<b>", INT]]}

CASES: list[tuple[Format, list[str], list[str]]] = [
    (regex(""), [""], ["a"]),
    (regex(r"[/\\]\n?"), ["/", "\\\n"], ["", "//"]),
    (const("Hi"), ["Hi"], ["", "H", "Hi!"]),
    (sequence(const("A: "), INT, const(" end")), ["A: 12 end", "A: -3 end"], ["A: end", "A: 1"]),
    (sequence(const("A: "), regex("[a-z]+"), const("abc"), INT), ["A: xabc1", "A: abcabc1"], ["A: abc1", "A: x1"]),
    (sequence(regex("[0-9]{2}/x"), const("\n")), ["12/x\n"], ["12/x"]),
    (
        {
            "type": "or",
            "elements": [
                const("yes"),
                const("no"),
                json_of(
                    {
                        "type": "object",
                        "properties": {"a": {"type": "integer"}},
                        "required": ["a"],
                        "additionalProperties": False,
                    }
                ),
            ],
        },
        ["yes", "no", '{"a": 1}'],
        ["maybe", "yesno"],
    ),
    (
        sequence(tag("<think>", ANY, "</think>"), const("\n"), INT),
        ["<think>hm < </thin ok</think>\n5"],
        ["<think>a</think>b</think>\n5", "5"],
    ),
    (
        {"type": "sequence", "elements": [tag("<think>", ANY, ["</think>", "</t>"]), CALLS]},
        ["<think>hm</think>", '<think>hm</t> text <f=a>1</f> more <f=b>"x"</f>'],
        ["<think>hm</t> <f=c", "<think>x</think> <f=a>x</f>"],
    ),
    (CALLS | {"excludes": ["bad"]}, ["ok <f=a>1</f>"], ["bad", "ok <f=a>1</f> so bad it"]),
    (
        tag("<r>", CALLS, "</r>"),
        ["<r></r>", "<r>so <f=a>1</f> and</r>"],
        ["<r>so</r> more", "<r>so <f=a>1</f>", "<r></r></r>"],
    ),
    (LIST, ["", "<f=a>1</f>", '<f=a>1</f>,<f=b>"x"</f>'], ["<f=a>1</f>,", "<f=a>1</f><f=a>1</f>", "x"]),
    (LIST | {"separator": "", "at_least_one": True}, ["<f=a>1</f>", '<f=a>1</f><f=b>"x"</f>'], [""]),
    (
        LIST | {"separator": ", ", "at_least_one": True, "stop_after_first": True},
        ["<f=a>1</f>"],
        ["", '<f=a>1</f>, <f=b>"x"</f>'],
    ),
    (sequence({"type": "optional", "content": const("pre ")}, INT), ["1", "pre 1"], ["pre "]),
    (sequence({"type": "optional", "content": INT}, const("x")), ["x", "3x"], ["3"]),
    ({"type": "plus", "content": const("ab")}, ["ab", "abab"], ["", "aba"]),
    ({"type": "star", "content": tag("<i>", INT, "</i>")}, ["", "<i>1</i>", "<i>1</i><i>2</i>"], ["<i>1"]),
    (
        {"type": "repeat", "min": 1, "max": 2, "content": tag("<i>", INT, "</i>")},
        ["<i>1</i>", "<i>1</i><i>2</i>"],
        ["", "<i>1</i><i>2</i><i>3</i>"],
    ),
    ({"type": "repeat", "min": 2, "max": -1, "content": const("a")}, ["aa", "aaaa"], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= "yes" | "no" [0-9]+'}, ["yes", "no12"], ["no"]),
    (sequence({"type": "grammar", "grammar": 'root ::= "yes" | "no" [0-9]+'}, const(".")), ["yes.", "no12."], ["no"]),
    ({"type": "any_text", "max_chars": 3, "excludes": ["x"]}, ["", "äöü"], ["abcd", "x"]),
    (sequence({"type": "any_text"}, const("END")), ["END", "a END"], ["a", "ENDx"]),
    (RULES | {"excludes": ["zz"]}, ["", "x <a>1 y <b>22", "<a>1<a>1"], ["<a>2", "zz"]),
    (RULES | {"loop": False}, ["", "x <a>1", "<b>22"], ["<a>1 more"]),
    (CALLS | {"at_least_one": True, "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f> x"]),
    (
        tag({"type": "token", "token": OPEN}, ANY, {"type": "token", "token": "<|close|>"}),
        ["<|open|>a<|close|>"],
        ["<|open|>a", "a<|close|>"],
    ),
    (tag("<|open|>", ANY, "\n<|close|>"), ["<|open|>a\nb\n<|close|>"], ["<|open|>a<|close|>"]),
    (
        sequence(ANY, either({"type": "token", "token": OPEN}, const("<|close|>")), INT),
        ["a<|open|>1", "<|close|>2"],
        ["a1", "a<|open|>"],
    ),
    (sequence(tag("", ANY, "."), tag("<x>", either(INT, const("n")), "")), ["a b.<x>5", ".<x>n"], ["a.b.<x>5"]),
]


@pytest.mark.parametrize(("form", "right", "wrong"), CASES)
def test_what_formats_let_through(form: Format, right: list[str], wrong: list[str]) -> None:
    grammar = grammar_of(form)
    for text in right:
        assert accepted(grammar, text), text
    for text in wrong:
        assert not accepted(grammar, text), text


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (tag("<x>", either(ANY, INT), "</x>"), "must be followed by a fixed text"),
        (sequence(ANY, INT), "must be followed by a fixed text"),
        (sequence(ANY, {"type": "optional", "content": const("x")}, const("y"), INT), "must be followed by"),
        ({"type": "star", "content": sequence(INT, ANY)}, "cannot end what star repeats"),
        ({"type": "any_tokens"}, "type 'any_tokens' is not supported; these are: const_string"),
        (ANY | {"max_tokens": 3}, "any_text.max_tokens is not supported"),
        (INT | {"style": "glm_xml"}, "style 'glm_xml' is not supported"),
        (INT | {"any_order": True}, "any_order is not supported"),
        (tag(3, ANY, ""), "tag.begin must be"),
        (tag("", ANY, None), "tag.end must be"),
        (either(), "or.elements is empty"),
        ({"type": "repeat", "min": 3, "max": 2, "content": ANY}, "repeat needs"),
        ({"type": "repeat", "min": 1, "max": 10_000, "content": ANY}, "max is 10000; at most 1000"),
        ({"type": "token", "token": "<nope>"}, "'<nope>' is no id"),
        (CALLS | {"triggers": ["<g"]}, "no trigger opens '<f=a>'"),
        (LIST | {"tags": []}, "tags is empty"),
        (sequence(3), "type None is not supported"),
        (regex("a\\"), "ends with a backslash"),
        (regex("(" * 70 + ")" * 70), "nested more than 64 deep"),
    ],
)
def test_what_is_refused_and_why(form: Format, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        grammar_of(form)
    assert caught.value.param == "structural_tag"
