"""Calls and reasoning as items of a response, and back again as input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .scripted import MODEL, Running, make_tokenizer

TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nIt asks for weather.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture
def client(hermes: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_items(hermes: Running, client: openai.OpenAI) -> None:
    hermes.client.answer_next = ANSWER
    answer = client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    reasoning, message, call = answer.output
    assert reasoning.type == "reasoning" and reasoning.content is not None
    assert reasoning.content[0].text.strip() == "It asks for weather."
    assert message.type == "message" and answer.output_text.strip() == "I look."
    assert call.type == "function_call" and call.name == "get_weather" and call.call_id.startswith("call_")
    assert json.loads(call.arguments) == {"city": "Paris"} and answer.status == "completed"
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    # The conversation goes on with the result, by reference and by value.
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    client.responses.create(
        model=MODEL, previous_response_id=answer.id, input=[result], tools=TOOLS, max_output_tokens=1
    )
    by_reference = hermes.client.seen[-1].prompt.tolist()
    items: Any = [{"role": "user", "content": "weather?"}, *(item.to_dict() for item in answer.output), result]
    client.responses.create(model=MODEL, input=items, tools=TOOLS, max_output_tokens=1)
    assert hermes.client.seen[-1].prompt.tolist() == by_reference
    assert "sunny" in make_tokenizer().decode(by_reference)


def test_stream_of_items(hermes: Running, client: openai.OpenAI) -> None:
    hermes.client.answer_next = ANSWER
    with client.responses.stream(model=MODEL, input="weather?", tools=TOOLS) as stream:
        events = list(stream)
        answer = stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    kinds = [event.type.removeprefix("response.") for event in events]
    for kind in ("reasoning_text.delta", "reasoning_text.done", "output_text.done", "function_call_arguments.delta",
                 "function_call_arguments.done"):  # fmt: skip
        assert kind in kinds
    assert kinds.count("output_item.added") == kinds.count("output_item.done") == 3
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    indices = [e.output_index for e in events if e.type == "response.output_item.done"]
    assert indices == [0, 1, 2]


BROKEN = [f'<tool_call>\n{{"name": "get_weather", "arguments": {text}' for text in (
    '{"city": tru}}\n</tool_call>', '"hello"}\n</tool_call>', '{"city": "Par'
)]  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_conversation_goes_on_behind_a_call_that_went_wrong(
    hermes: Running, client: openai.OpenAI, text: str
) -> None:
    hermes.client.answer_next = text
    answer = client.responses.create(model=MODEL, input="weather?", tools=TOOLS)
    (call,) = answer.output
    assert call.type == "function_call" and call.status == "incomplete"
    assert answer.to_dict()["parse_error"]
    hermes.client.answer_next = text
    with client.responses.stream(model=MODEL, input="weather?", tools=TOOLS) as stream:
        assert stream.get_final_response().output[0].to_dict()["arguments"] == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "no such city"}
    for more in ([result], "hello"):
        client.responses.create(model=MODEL, previous_response_id=answer.id, input=more, max_output_tokens=1)
        prompt = make_tokenizer().decode(hermes.client.seen[-1].prompt.tolist())
        assert json.dumps({"raw_arguments": call.arguments}) in prompt


def test_allowed_tools_in_either_shape(hermes: Running, client: openai.OpenAI) -> None:
    other = {**TOOLS[0], "name": "other"}
    constraints = []
    for allowed in (
        {"mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
        {"allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}},
    ):
        choice: Any = {"type": "allowed_tools", **allowed}
        client.responses.create(model=MODEL, input="x", tools=[*TOOLS, other], tool_choice=choice, max_output_tokens=1)
        constraints.append(hermes.client.seen[-1].constraint)
    assert constraints[0] == constraints[1] is not None and "other" not in constraints[0].text


@pytest.mark.parametrize("choice", [
    "required", {"type": "function", "name": "get_weather"}, {"type": "web_search"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    {"type": "allowed_tools", "mode": "auto", "tools": [5]}, {"type": "allowed_tools", "tools": {}},
])  # fmt: skip
def test_a_choice_among_no_tools_is_refused(client: openai.OpenAI, choice: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input="x", tool_choice=choice)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize("answer", ["hé 日本 😀 ok", f"<think>\nhm 日\n</think>\n\n日本 I look. {CALL}", CALL])
def test_every_token_of_the_text_has_its_logprobs(hermes: Running, client: openai.OpenAI, answer: str) -> None:
    include: Any = ["message.output_text.logprobs"]
    text = answer.partition("</think>")[2].partition("<tool")[0].strip() if "<think>" in answer else answer
    hermes.client.answer_next = answer
    whole = client.responses.create(model=MODEL, input="x", tools=TOOLS, include=include)
    parts = [part for item in whole.output if item.type == "message" for part in item.content]
    entries = [bytes(entry.bytes) for part in parts if part.type == "output_text" for entry in part.logprobs or ()]
    assert b"".join(entries).decode().removesuffix("<|end|>").strip() == ("" if answer == CALL else text)
    hermes.client.answer_next = answer
    with client.responses.stream(model=MODEL, input="x", tools=TOOLS, include=include) as stream:
        done = [e for e in stream if e.type == "response.output_text.done"]
    assert [bytes(e.to_dict()["bytes"]) for part in done for e in part.logprobs] == entries
