"""Tool calls: what every family writes is read, whole or in pieces, and nothing that is written gets lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.text.answer import AnswerParser, parse_answer
from bough.text.events import CallArguments, CallStart, Content, Event, Reasoning, Trouble, merge_events
from bough.text.tools.families import BY_NAME, FAMILIES, detect_family
from bough.text.tools.format import Family
from bough.text.tools.parser import MAX_CALLS
from bough.text.tools.writer import write_calls

from .golden import GOLDEN, NO_CALLS, TOOLS, Calls

NAMES = [family.name for family in FAMILIES]
PER_FAMILY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parser(family: Family, tools: Any = TOOLS) -> AnswerParser:
    return AnswerParser(None, family, tools)


def in_pieces(made: AnswerParser, text: str, cuts: Sequence[int]) -> list[Event]:
    events: list[Event] = []
    edges = [0, *sorted(cuts), len(text)]
    for start, end in zip(edges, edges[1:]):
        events += made.push(text[start:end])
    return merge_events([*events, *made.finish()])


def calls_of(events: list[Event]) -> list[tuple[str, str]]:
    starts = [event for event in events if isinstance(event, CallStart)]
    assert [start.index for start in starts] == list(range(len(starts)))
    return [
        (s.name, "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == s.index)) for s in starts
    ]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOLDEN)
def test_golden_answers(name: str, text: str, content: str, calls: Calls) -> None:
    events = parse_answer(parser(BY_NAME[name]), text)
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls
    assert content_of(events).replace("Weather first.", "").strip("\n") == content
    assert not [event for event in events if isinstance(event, Trouble)]
    for size in (1, 2, 3, 7):
        assert in_pieces(parser(BY_NAME[name]), text, range(size, len(text), size)) == events


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_stays_text(name: str, text: str) -> None:
    events = parse_answer(parser(BY_NAME[name]), text)
    assert content_of(events) == text and not calls_of(events)
    assert in_pieces(parser(BY_NAME[name]), text, range(1, len(text))) == events
    if any(trigger in text for trigger in BY_NAME[name].triggers):
        assert [event.reason for event in events if isinstance(event, Trouble)]


def pieces_of(family: Family) -> st.SearchStrategy[str]:
    """Text of the family's own literals, of beginnings of them, and of what stands between."""
    own = sorted({text for form in family.formats for text in form.literals})
    parts = [*own, *(text[: len(text) // 2] for text in own), "get_weather", "get_time", "city", "{", "}", "[", "]",
             "(", ")", '"', "'", "\\", ",", ":", "=", " ", "\n", "name", '{"name": "get_weather", "arguments": ',
             '{"city": "é"}', "2", "-1e5", "true", "None", "<", "日", "\x07", "```", "city=",
             "to=functions.get_time"]  # fmt: skip
    return st.lists(st.one_of(st.sampled_from(parts), st.text(max_size=3)), max_size=14).map("".join)


@pytest.mark.parametrize("name", NAMES)
def test_any_text_in_any_pieces(name: str) -> None:
    family = BY_NAME[name]
    golden = [text for known, text, _, _ in GOLDEN if known == name]

    @PER_FAMILY
    @given(text=st.one_of(pieces_of(family), st.sampled_from(golden)), tail=pieces_of(family), data=st.data())
    def check(text: str, tail: str, data: st.DataObject) -> None:
        text += tail
        whole = parse_answer(parser(family), text)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
        assert in_pieces(parser(family), text, cuts) == whole
        assert in_pieces(parser(family), text, range(1, len(text))) == whole
        if text.strip() and name != "gpt-oss":  # whose headers say nothing
            assert content_of(whole) or calls_of(whole)
        if not calls_of(whole) and name != "gpt-oss":
            assert content_of(whole) == text

    check()


LETTERS = st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"], include_characters="\n\t")
TEXT = st.text(LETTERS, max_size=12)


@st.composite
def some_calls(draw: st.DrawFn) -> Calls:
    calls: Calls = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            calls.append(("get_time", {}))
            continue
        arguments: dict[str, Any] = {"city": draw(TEXT)}
        options = {"days": st.integers(), "metric": st.booleans(), "hours": st.lists(st.integers(), max_size=3),
                   "where": st.dictionaries(st.sampled_from(["lat", "b"]), st.integers(), max_size=2)}  # fmt: skip
        for key in draw(st.lists(st.sampled_from(sorted(options)), unique=True)):
            arguments[key] = draw(options[key])
        calls.append(("get_weather", arguments))
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_what_the_writer_writes_the_parser_reads(name: str) -> None:
    family = BY_NAME[name]

    @PER_FAMILY
    @given(calls=some_calls())
    def check(calls: Calls) -> None:
        text = write_calls(family, calls)
        own = [t for form in family.formats for t in form.literals if "<" in t or "`" in t or "[" in t]
        if any(t.strip() in a.get("city", "") for _, a in calls for t in own):
            return  # formats without escapes cannot say their own tags
        events = parse_answer(parser(family), text)
        read = [(n, json.loads(a)) for n, a in calls_of(events)]
        assert read == calls
        assert not content_of(events) and not [e for e in events if isinstance(e, Trouble)]

    check()


# Details of values


def arguments(name: str, text: str, tools: Any = None) -> Any:
    (_, found), *_ = calls_of(parse_answer(parser(BY_NAME[name], tools), text))
    return json.loads(found)


def test_python_literals() -> None:
    text = (
        r"""[f(a='it\'s', b="\u00e9\x41\n", c=None, d=[1, 2.5, (True, False)], e={'k': {"x": -1}}, g='''a'b''', h='',"""
        r""" i=0x10, j=1_000, k=word, l=.5,)]"""
    )
    assert arguments("pythonic", text) == {
        "a": "it's", "b": "éA\n", "c": None, "d": [1, 2.5, [True, False]], "e": {"k": {"x": -1}}, "g": "a'b", "h": "",
        "i": 16, "j": 1000, "k": "word", "l": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("schema", "text", "value"), [
    ({"type": "string"}, "2", "2"),
    ({"type": "string"}, " padded ", " padded "),
    ({"type": "string"}, 'two\nlines "q" \\', 'two\nlines "q" \\'),
    ({"type": "integer"}, "2", 2),
    ({"type": "integer"}, "two", "two"),
    ({"type": "boolean"}, "True", True),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "nil", "nil"),
    ({"anyOf": [{"type": "array"}, {"type": "string"}]}, "[1]", [1]),
    ({"type": "object"}, '{"a": {"b": 1}}', {"a": {"b": 1}}),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"$ref": "#/$defs/s"}, "7", "7"),
    ({}, "7", 7),
    ({}, "seven", "seven"),
])  # fmt: skip
def test_text_becomes_the_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"x": schema}, "$defs": {"s": {"type": "string"}}}}
    answer = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert arguments("qwen3-coder", answer, tools) == {"x": value}


def test_line_ends_within_json_strings_are_escaped() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {"code": "a\n\tb"}}</tool_call>'
    assert arguments("hermes", answer) == {"code": "a\n\tb"}


def test_a_backslash_before_a_line_end_stays_a_backslash_however_the_text_is_cut() -> None:
    answer = '<tool_call>{"name": "f", "arguments": {"code": "a \\\\\n\tb \\\n\tc \\""}}</tool_call>'
    assert arguments("hermes", answer) == {"code": 'a \\\n\tb \\\n\tc "'}
    whole = parse_answer(parser(BY_NAME["hermes"], None), answer)
    for size in (1, 2, 3, 5):
        assert in_pieces(parser(BY_NAME["hermes"], None), answer, range(size, len(answer), size)) == whole


@pytest.mark.parametrize(("name", "text", "calls", "content"), [
    ("pythonic", '[get_weather("Paris")]', [], '[get_weather("Paris")]'),
    ("gemma-3", '```tool_code\nget_weather("Paris")\n```', [], '```tool_code\nget_weather("Paris")\n```'),
    ("pythonic", "[get_time(), get_weather(Paris, 2)]", [("get_time", "{}")], ", get_weather(Paris, 2)]"),
    ("pythonic", "[get_weather(city='P', metres 2)]", [("get_weather", '{"city": "P"')], ", metres 2)]"),
    ("gemma-4", "<|tool_call>call:get_weather{city", [], "<|tool_call>call:get_weather{city"),
    (
        "qwen3-coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nP\n</parameter>\n<parameter=da",
        [("get_weather", '{"city": "P"')], "<parameter=da",
    ),
])  # fmt: skip
def test_what_is_taken_for_arguments_and_is_none_stays_text(name: str, text: str, calls: Any, content: str) -> None:
    events = parse_answer(parser(BY_NAME[name]), text)
    assert calls_of(events) == calls and content_of(events) == content
    assert [event for event in events if isinstance(event, Trouble)]
    assert in_pieces(parser(BY_NAME[name]), text, range(1, len(text))) == events


@pytest.mark.parametrize("arguments", ['{"city": "P"}', '"{\\"city\\": \\"P\\"}"', '""', '"x"', "null", "[1]", "2"])
def test_the_order_of_an_envelope_does_not_matter(arguments: str) -> None:
    texts = [
        f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>',
        f'<tool_call>{{"arguments": {arguments}, "name": "get_weather"}}</tool_call>',
    ]
    one, other = (parse_answer(parser(BY_NAME["hermes"]), text) for text in texts)
    assert calls_of(one) == calls_of(other)
    assert [e for e in one if isinstance(e, Trouble)] == [e for e in other if isinstance(e, Trouble)]
    for events, text in ((one, texts[0]), (other, texts[1])):
        assert calls_of(events) or content_of(events) == text


@pytest.mark.parametrize("name", ["gpt-oss", "functiongemma", "gemma-4", "hermes", "pythonic"])
def test_arguments_that_speak_of_formats_come_back(name: str) -> None:
    city = '<|end|> \\" <|start|>assistant<|channel|>final<|message|>x<|return|><|call|>\\'
    calls: Calls = [("get_weather", {"city": city, "where": dict.fromkeys(("a b", 'q"', "x:y", "{", "", "é"), 1)})]
    text = write_calls(BY_NAME[name], calls)
    events = parse_answer(parser(BY_NAME[name]), text)
    assert [(n, json.loads(a)) for n, a in calls_of(events)] == calls
    assert not content_of(events) and not [e for e in events if isinstance(e, Trouble)]
    assert in_pieces(parser(BY_NAME[name]), text, range(1, len(text))) == events


def test_arguments_that_are_not_json_come_as_they_are_with_the_reason() -> None:
    events = parse_answer(parser(BY_NAME["hermes"]), '<tool_call>{"name": "get_time", "arguments": {x: 1}}</tool_call>')
    assert calls_of(events) == [("get_time", "{x: 1}")]
    assert [e for e in events if isinstance(e, Trouble)] == [
        Trouble("the arguments are not a valid JSON object", 0)
    ]  # fmt: skip


def test_a_bad_call_behind_a_good_one_is_text() -> None:
    good, bad = '{"name": "get_time", "arguments": {}}', '{"name": "rm_rf", "arguments": {}}'
    events = parse_answer(parser(BY_NAME["hermes"]), f"<tool_call>[{good}, {bad}]</tool_call> So.")
    assert calls_of(events) == [("get_time", "{}")]
    assert content_of(events) == f", {bad}]</tool_call> So."


def test_arguments_stream_as_they_come() -> None:
    made = parser(BY_NAME["hermes"])
    assert made.push('<tool_call>{"name": "get_weather", "arguments": ') == []
    assert made.push('{"ci') == [CallStart(0, "get_weather"), CallArguments(0, '{"ci')]
    assert made.push('ty": "P') == [CallArguments(0, 'ty": "P')]
    coder = parser(BY_NAME["qwen3-coder"])
    coder.push("<tool_call>\n<function=get_weather>\n<parameter=city>\nPar")
    assert coder.push("is") == [CallArguments(0, "is")]


def test_the_number_of_calls_is_bounded() -> None:
    text = '<tool_call>{"name": "get_time"}</tool_call>' * (MAX_CALLS + 5)
    events = parse_answer(parser(BY_NAME["hermes"]), text)
    assert len(calls_of(events)) == MAX_CALLS and content_of(events).count("<tool_call>") == 5


# Families


def test_triggers_are_told_apart() -> None:
    for family in FAMILIES:
        for trigger in family.triggers:
            assert not [other for other in family.triggers if other != trigger and other.startswith(trigger)]


@pytest.mark.parametrize(("template", "name"), [
    ("{{ '<tool_call>' }}", "hermes"),
    ("<tool_call>\n<function=example>", "qwen3-coder"),
    ("<tool_call>{function-name}\n<arg_key>", "glm-4.5"),
    ("<|start_header_id|> <|python_tag|>", "llama3-json"),
    ("<|header_start|> [func_name1(params_name1=", "pythonic"),
    ("[TOOL_CALLS] [", "mistral"),
    ("[TOOL_CALLS] [ARGS]", "mistral-v11"),
    ("<｜tool▁calls▁begin｜> ```json", "deepseek-v3"),
    ("<｜tool▁calls▁begin｜>", "deepseek-v3.1"),
    ("<|tool_calls_section_begin|>", "kimi-k2"),
    ("<|start|> <|channel|> <|message|>", "gpt-oss"),
    ("<|tool|> <|/tool|>", "phi-4"),
    ("<|start_of_role|> <|tool_call|>", "granite"),
    ("<start_of_turn>", "gemma-3"),
    ("<start_of_turn> <start_function_call>", "functiongemma"),
    ("<|turn> <|tool_call>call:", "gemma-4"),
    ("<minimax:tool_call>", "minimax-m2"),
    ("<|im_start|>", "json"),
])  # fmt: skip
def test_families_are_known_by_their_templates(template: str, name: str) -> None:
    assert detect_family(template).name == name


# Time


def garbage(family: Family, size: int) -> list[str]:
    """Texts of ``size`` characters that make a parser look ahead, go back, or nest, if anything does."""
    opener = max(family.triggers, key=len, default="[")
    head = write_calls(family, [("get_weather", {"city": "x"})]).partition("x")[0]
    shapes = [opener, opener[:-1], head, head + '\\"', '{"name": ', "[", "{", "(", "<", '"', "\\", " ", "\n", "a", "'"]
    repeated = [(shape * (size // len(shape) + 1))[:size] for shape in shapes]
    behind = [
        (head + shape * size)[:size] for shape in ("[", "{", '"', "\\", " ", "a", "</", "<|", "\n</", opener[:-1])
    ]
    return repeated + behind


@pytest.mark.parametrize("name", NAMES)
def test_time_is_linear(name: str) -> None:
    family = BY_NAME[name]

    def seconds(text: str) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()
            in_pieces(parser(family), text, range(64, len(text), 64))
            best = min(best, time.thread_time() - started)
        return best

    for small, large in zip(garbage(family, 1 << 11), garbage(family, 1 << 14), strict=True):
        # Eight times the text; the allowance is for the noise of a shared machine.
        assert seconds(large) < 20 * seconds(small) + 0.02, large[:60]


def test_reasoning_and_content_keep_their_order() -> None:
    from bough.text.reasoning.families import BY_NAME as REASONING

    made = AnswerParser(REASONING["qwen3"], BY_NAME["hermes"], TOOLS)
    text = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    events = parse_answer(made, text)
    assert events == [Reasoning("hm"), Content("I look."), CallStart(0, "get_time"), CallArguments(0, "{}")]
