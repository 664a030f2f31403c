"""Reasoning is told from the answer, whole or in pieces, whatever the prompt began."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.errors import ConfigError
from bough.text.answer import AnswerParser, parse_answer
from bough.text.events import CallArguments, CallStart, Content, Event, Reasoning, merge_events
from bough.text.formats import AnswerFormat, find_reasoning, find_tools
from bough.text.reasoning.families import BY_NAME, FAMILIES, detect_reasoning
from bough.text.tools.families import BY_NAME as TOOLS

NAMES = [family.name for family in FAMILIES]
TAGGED = [family.name for family in FAMILIES if not family.channels]


def separated(name: str, text: str, started: bool | None = None) -> tuple[str, str]:
    events = parse_answer(AnswerParser(BY_NAME[name], started=started), text)
    return (
        "".join(e.text for e in events if isinstance(e, Reasoning)),
        "".join(e.text for e in events if isinstance(e, Content)),
    )


@pytest.mark.parametrize("name", TAGGED)
def test_tags(name: str) -> None:
    form = BY_NAME[name]
    said = "Two and two:\n\nfour"
    assert separated(name, f"{form.opens}\n{said}\n{form.closes}\n\n4 is it.") == (said, "4 is it.")
    assert separated(name, f"{said}\n{form.closes}\n\n4", started=True) == (said, "4")
    assert separated(name, f"{form.opens}{said}", started=None) == (said, "")
    assert separated(name, " 4 is it.\n", started=False) == ("", " 4 is it.\n")
    assert separated(name, "No reasoning.") == (("No reasoning.", "") if form.assumed else ("", "No reasoning."))


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Said.<|return|>",
     "Think.", "Said."),
    ("<|channel|>final<|message|>Said.", "", "Said."),
    ("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
     "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}", "One.\nTwo.", "{}"),
    ("<|channel|>commentary<|message|>Plan.<|end|><|start|>assistant<|channel|>final<|message|>Said.", "",
     "Plan.\nSaid."),
    ("No channels.", "", "No channels."),
    ("<|channel|>ana", "", "<|channel|>ana"),
])  # fmt: skip
def test_channels(text: str, reasoning: str, content: str) -> None:
    assert separated("gpt-oss", text) == (reasoning, content)


NEXT, FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"
PLAN = f"<|channel|>commentary<|message|>Plan.{NEXT}"


@pytest.mark.parametrize(("text", "started", "reasoning", "content"), [
    (f"{PLAN}{FINAL}{{}}<|return|>", None, "Plan.", "{}"),
    (f"<|channel|>analysis<|message|>Think.{NEXT}{PLAN}<|channel|>final <|constrain|>json<|message|>{{}}", None,
     "Think.\nPlan.", "{}"),
    (f"Well. <|channel|>odd<|end|>{FINAL}{{}}<|end|>\n", None, "Well. <|channel|>odd<|end|>\n", "{}"),
    (f"<|channel|>commentary to=functions.f<|message|>1<|call|>{FINAL}{{}}", None, "1", "{}"),
    ("<|channel|>fin", None, "<|channel|>fin", ""),
    ("1}<|return|>", False, "", "1}"),
])  # fmt: skip
def test_a_constrained_answer_is_on_its_channel(text: str, started: bool | None, reasoning: str, content: str) -> None:
    def made() -> AnswerParser:
        return AnswerParser(BY_NAME["gpt-oss"], started=started, final_only=True)

    events = parse_answer(made(), text)
    assert "".join(e.text for e in events if isinstance(e, Reasoning)) == reasoning
    assert "".join(e.text for e in events if isinstance(e, Content)) == content
    assert in_pieces(made(), text, range(1, len(text))) == events


def test_calls_before_a_constrained_answer_stay_calls() -> None:
    made = AnswerParser(BY_NAME["gpt-oss"], TOOLS["gpt-oss"], None, final_only=True)
    call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    kinds = [type(event) for event in parse_answer(made, PLAN + call)]
    assert kinds == [Reasoning, CallStart, CallArguments]


def test_a_call_can_end_the_reasoning() -> None:
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    made = AnswerParser(BY_NAME["kimi-k2"], TOOLS["kimi-k2"], None, started=True)
    events = parse_answer(made, f"I should call.{call}")
    assert events[0] == Reasoning("I should call.") and len(events) == 3


def pieces_of(name: str) -> st.SearchStrategy[str]:
    form = BY_NAME[name]
    marks = [form.opens, form.closes, form.opens[:-2], form.closes[:-2], "<|start|>assistant", "<|channel|>final",
             "<|message|>", " ", "\n", "<", "Said.", "日"]  # fmt: skip
    return st.lists(st.one_of(st.sampled_from(marks), st.text(max_size=3)), max_size=10).map("".join)


def in_pieces(made: AnswerParser, text: str, cuts: Sequence[int]) -> list[Event]:
    edges = [0, *sorted(cuts), len(text)]
    events = [event for start, end in zip(edges, edges[1:]) for event in made.push(text[start:end])]
    return merge_events([*events, *made.finish()])


@pytest.mark.parametrize("name", NAMES)
def test_any_text_in_any_pieces(name: str) -> None:
    @settings(max_examples=40, deadline=None)
    @given(text=pieces_of(name), started=st.sampled_from([None, True, False]), hold=st.booleans(), data=st.data())
    def check(text: str, started: bool | None, hold: bool, data: st.DataObject) -> None:
        def made() -> AnswerParser:
            return AnswerParser(BY_NAME[name], started=started, hold_reasoning=hold)

        whole = parse_answer(made(), text)
        cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
        assert in_pieces(made(), text, cuts) == whole
        assert in_pieces(made(), text, range(1, len(text))) == whole
        shown = "".join(e.text for e in whole if isinstance(e, Reasoning | Content))
        said = text
        for mark in (BY_NAME[name].opens, BY_NAME[name].closes):
            said = said.replace(mark, "", 1)
        assert name == "gpt-oss" or len("".join(shown.split())) >= len("".join(said.split()))

    check()


def test_held_reasoning_comes_in_one_piece() -> None:
    made = AnswerParser(BY_NAME["qwen3"], hold_reasoning=True)
    assert made.push("<think>one ") == made.push("two") == made.push(" three</think>") == []
    assert made.push("\n\n4") == [Reasoning("one two three"), Content("4")]


def test_bytes_of_reasoning() -> None:
    made = AnswerParser(BY_NAME["qwen3"])
    made.push("<think>é</think>")
    assert made.reasoning_bytes == len("<think>é</think>".encode())
    made.push("said")
    assert made.reasoning_bytes == len("<think>é</think>".encode())


@pytest.mark.parametrize("name", NAMES)
def test_time_is_linear(name: str) -> None:
    def seconds(text: str) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.thread_time()
            in_pieces(AnswerParser(BY_NAME[name]), text, range(64, len(text), 64))
            best = min(best, time.thread_time() - started)
        return best

    form = BY_NAME[name]
    for shape in (form.opens, form.closes[:-1], form.opens + form.closes, " ", "<", "a"):
        small, large = ((shape * size)[:size] for size in (1 << 11, 1 << 14))
        assert seconds(large) < 20 * seconds(small) + 0.02, shape


@pytest.mark.parametrize(("template", "name"), [
    ("<|im_start|>", None),
    ("{{ '<think>' }}", "qwen3"),
    ("<｜Assistant｜><think>\n", "deepseek-r1"),
    ("<arg_key> <think>", "glm-4.5"),
    ("<|tool_calls_section_begin|> </think>", "kimi-k2"),
    ("[THINK]", "magistral"),
    ("<|channel|> <|message|>", "gpt-oss"),
    ("◁think▷", "kimi"),
    ("<|START_THINKING|> <|END_THINKING|>", "<|START_THINKING|>...<|END_THINKING|>"),
    ("<|begin_of_thought|>{{ x.split('<|end_of_thought|>') }}", "<|begin_of_thought|>...<|end_of_thought|>"),
    ("<thinking>{{ x }}</thinking>", "<thinking>...</thinking>"),
    ("<thinking>", None),
])  # fmt: skip
def test_formats_are_known_by_their_templates(template: str, name: str | None) -> None:
    found = detect_reasoning(template)
    assert (None if found is None else found.name) == name


def test_what_the_prompt_says() -> None:
    form = AnswerFormat(None, BY_NAME["qwen3"])
    assert form.thinking("<|im_start|>assistant\n<think>\n") is True
    assert form.thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n") is False
    assert form.thinking("<|im_start|>assistant\n") is None
    assert AnswerFormat(None, None).thinking("<think>") is None


def test_names() -> None:
    assert find_tools("none", "") is None and find_reasoning("none", "<think>") is None
    assert find_tools("llama3", "") is TOOLS["llama3-json"]
    with pytest.raises(ConfigError, match="unknown tool parser 'x'; known: auto, none"):
        find_tools("x", "")
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        find_reasoning("x", "")
    for name in ("...", "<a>...", "...</a>"):
        with pytest.raises(ConfigError, match="OPEN...CLOSE"):
            find_reasoning(name, "")


def test_any_two_tags() -> None:
    form = find_reasoning("<plan> ... </plan>", "")
    assert form is not None and (form.opens, form.closes) == ("<plan>", "</plan>")
    for text, started in (("<plan>\nFirst.\n</plan>\n\nDone.", None), ("First.</plan>Done.", True)):
        for cut in range(len(text)):
            made = AnswerParser(form, started=started)
            assert in_pieces(made, text, [cut]) == [Reasoning("First."), Content("Done.")]


def test_what_is_neither_told_apart_is_content_as_it_comes() -> None:
    made = AnswerParser(None)
    assert [made.push(piece) for piece in ("<think> a", "{", " ")] == [
        [Content("<think> a")], [Content("{")], [Content(" ")],
    ]  # fmt: skip
    assert made.finish() == [] and made.reasoning_bytes is None
