"""Forced calls of a random model: only the grammar can make them what they are."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from .serving import Server

pytest.importorskip("bough.grammar.llguidance")

ASK: Any = [{"role": "user", "content": "the cat"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "set_lamp", "strict": True, "parameters": {
        "type": "object",
        "properties": {"state": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["state", "level"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "get_time", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.mark.parametrize("seed", range(4))
def test_forced_calls_are_calls(served: Server, seed: int) -> None:
    named: Any = {"type": "function", "function": {"name": "set_lamp"}}
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        for choice in ("required", named):
            answer = client.chat.completions.create(
                model="tiny", messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, seed=seed,
                temperature=1.5, n=2,
            )  # fmt: skip
            for made in answer.choices:
                assert made.finish_reason == "tool_calls" and made.message.content is None
                (call,) = made.message.tool_calls or []
                assert call.type == "function" and (choice == "required" or call.function.name == "set_lamp")
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_forced_call_streams(served: Server) -> None:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        ) as stream:
            for _ in stream:
                pass
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
