"""Calls and reasoning as items of a response, and back again as input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from .scripted import MODEL, Running, make_tokenizer, running_server

TOOLS: Any = [
    {
        "type": "function",
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ANSWER = f"<think>\nIt asks for weather.\n</think>\n\nI look.\n{CALL}"


@pytest.fixture(scope="module")
def hermes() -> Iterator[Running]:
    with running_server(tool_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


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
