"""docs/openai.md names every field that OpenAI's client can send, and the server does what it says there."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from .scripted import MODEL

DOCS = Path(__file__).parents[2] / "docs" / "openai.md"
if not DOCS.exists():
    pytest.skip("needs the source tree", allow_module_level=True)

BASES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat_create_params.CompletionCreateParamsBase,
        {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    ),
    "/v1/completions": (
        completion_create_params.CompletionCreateParamsBase,
        {"model": MODEL, "prompt": "hello", "max_tokens": 1},
    ),
    "/v1/responses": (
        response_create_params.ResponseCreateParamsBase,
        {"model": MODEL, "input": "hello", "max_output_tokens": 1},
    ),
}
"""Path -> (what the client can send, a body that works)."""

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
SAMPLES: dict[str, Any] = {
    "access_programs": {"cyber": "standard"}, "audio": {"format": "wav", "voice": "alloy"}, "background": True,
    "best_of": 2, "context_management": [{"type": "compaction"}], "conversation": "conv_1", "echo": True,
    "frequency_penalty": 0.1, "function_call": "auto", "functions": [FUNCTION],
    "image": {"context_compression": "auto"}, "include": ["message.output_text.logprobs"], "instructions": "be brief",
    "logit_bias": {"5": 1}, "max_completion_tokens": 2, "max_tokens": 2, "max_output_tokens": 20, "max_tool_calls": 1,
    "metadata": {"a": "b"}, "modalities": ["text", "audio"], "moderation": {"model": "omni"}, "n": 2,
    "parallel_tool_calls": True, "prediction": {"type": "content", "content": "a"}, "presence_penalty": 0.1,
    "previous_response_id": None, "prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h", "reasoning_effort": "low", "reasoning": {"effort": "low"},
    "response_format": {"type": "json_object"}, "safety_identifier": "s", "seed": 5, "service_tier": "auto",
    "stop": ["zzz"], "store": True, "stream_options": {"include_usage": True}, "suffix": "end", "temperature": 0.5,
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "tool_choice": "none", "top_logprobs": 2, "top_p": 0.9,
    "truncation": "auto", "user": "u", "verbosity": "low", "web_search_options": {"search_context_size": "low"},
}  # fmt: skip
"""A value of each field that asks for what the field is for."""

ALONG = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}
"""What a field needs beside it."""


def sample(path: str, name: str) -> Any:
    if name == "logprobs":
        return 2 if path == "/v1/completions" else True
    if name == "tools":
        return [
            {"type": "function", **FUNCTION} if path == "/v1/responses" else {"type": "function", "function": FUNCTION}
        ]
    if name == "prompt" and path == "/v1/responses":
        return {"id": "pmpt_1"}
    return SAMPLES[name]


def table(path: str) -> dict[str, tuple[str, str]]:
    """Field -> (honoured, accepted or refused, what the docs say of it)."""
    section = DOCS.read_text().partition(f"## `POST {path}`")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (\w+) \| (.*) \|$", section, re.MULTILINE)
    return {name: (status, what) for names, status, what in rows for name in re.findall(r"`([a-z_]+)`", names)}


@pytest.mark.parametrize("path", BASES)
def test_the_docs_name_every_field(path: str) -> None:
    known = set(typing.get_type_hints(BASES[path][0])) | {"stream"}
    rows = table(path)
    assert set(rows) == known, (known - set(rows), set(rows) - known)
    assert {status for status, _ in rows.values()} <= {"honoured", "accepted", "refused"}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in BASES for name in sorted(table(path))])
def test_the_server_does_what_the_docs_say(http: httpx.Client, path: str, name: str) -> None:
    base = BASES[path][1]
    if name in base and name != "max_tokens" or name == "stream":
        return
    answer = http.post(path, json={**base, name: sample(path, name), **(ALONG.get(name, {}))})
    status, _ = table(path)[name]
    if status == "refused":
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == name and len(answer.json()["error"]["message"]) > 20
    else:
        assert answer.status_code == 200, answer.text
