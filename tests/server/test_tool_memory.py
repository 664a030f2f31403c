"""What is remembered of tools is what would be found out anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.server.schema import ChatRequest, TokenizeRequest
from bough.server.tool_memory import Memo, ToolMemory
from bough.server.tools import tool_use
from bough.text.formats import AnswerFormat
from bough.text.reasoning.families import BY_NAME as REASONING
from bough.text.tools.families import BY_NAME

from .scripted import make_tokenizer

ASK: list[dict[str, Any]] = [{"role": "user", "content": "weather?"}]
FORM = AnswerFormat(BY_NAME["hermes"], REASONING["qwen3"])


def tool(name: str, strict: bool, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


SCHEMAS = st.sampled_from([
    {"type": "object", "properties": {"a": {"type": "integer"}}}, {"type": "object"}, {"type": "array"},
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
])  # fmt: skip
BODIES = st.builds(
    ChatRequest,
    messages=st.just(ASK),
    tools=st.lists(st.builds(tool, st.sampled_from("fg"), st.booleans(), SCHEMAS), max_size=2),
    tool_choice=st.sampled_from([None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}]),
    parallel_tool_calls=st.sampled_from([None, False]),
)
ASKED = st.sampled_from([None, Constraint(kind="json_object"), Constraint(kind="regex", text="a+")])


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(st.tuples(BODIES, ASKED, st.booleans()), min_size=1, max_size=6))
def test_the_same_as_anew(asked: list[tuple[ChatRequest, Constraint | None, bool]]) -> None:
    memory, tokenizer = ToolMemory(DEFAULT_LIMITS), make_tokenizer()
    for body, constraint, thinks in [*asked, *asked]:
        try:
            anew = tool_use(body, DEFAULT_LIMITS)
        except InvalidRequest as error:
            with pytest.raises(InvalidRequest) as caught:
                memory.use(body)
            assert (caught.value.message, caught.value.param) == (error.message, error.param)
            continue
        use = memory.use(body)
        assert replace(use, key=b"") == anew
        thinking = FORM.reasoning if thinks else None
        own = None if constraint is None else Constraint(kind=constraint.kind, text=constraint.text)
        made = memory.constraint(use, FORM, tokenizer, thinking, own)
        assert made == anew.constraint(FORM, tokenizer, thinking, own)
        assert (made is own) == (made == own)


def test_a_question_of_tokens_is_another_one() -> None:
    memory, tools = ToolMemory(DEFAULT_LIMITS), [tool("f", False, {"type": "object"})]
    assert memory.use(ChatRequest(messages=ASK, tools=tools, tool_choice="none")).shown is None
    assert memory.use(TokenizeRequest(messages=ASK, tools=tools)).shown == tools


def test_what_was_used_longest_ago_is_forgotten() -> None:
    memo: Memo[str] = Memo(10)
    made: list[str] = []

    def recall(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key

        return memo.recall(key, make, len)

    for key in ("aaaa", "bbbb", "aaaa", "cccc", "aaaa", "bbbb", "d" * 11, "d" * 11):
        assert recall(key) == key
    assert made == ["aaaa", "bbbb", "cccc", "bbbb", "d" * 11, "d" * 11]
