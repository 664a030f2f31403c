"""Anthropic's, Ollama's and OpenAI's clients against the real server and a random model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import numpy as np
import ollama
import openai

from .serving import Server

ASK: Any = [{"role": "user", "content": "the cat"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"state": {"enum": ["on", "off"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["state", "level"],
    "additionalProperties": False,
}


def test_anthropic(served: Server) -> None:
    tool: Any = {"name": "set_lamp", "input_schema": SCHEMA}
    output: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        forced = client.messages.create(model="tiny", max_tokens=400, messages=ASK, tools=[tool], tool_choice=choice)
        assert forced.stop_reason == "tool_use"
        for block in forced.content:
            assert block.type == "tool_use"
            jsonschema.validate(block.input, SCHEMA)
        shaped = client.messages.create(model="tiny", max_tokens=400, messages=ASK, output_config=output)
        jsonschema.validate(json.loads(shaped.content[0].to_dict()["text"]), SCHEMA)  # type: ignore[arg-type]  # text
        again = client.messages.create(model="tiny", max_tokens=4, messages=ASK)
        usage = again.usage
        assert usage.cache_read_input_tokens and usage.input_tokens >= 1
        with client.messages.stream(model="tiny", max_tokens=24, messages=ASK, extra_body={"temperature": 0}) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(model="tiny", max_tokens=24, messages=ASK, extra_body={"temperature": 0})
        texts = [[block.to_dict()["text"] for block in message.content] for message in (streamed, whole)]
        assert texts[0] == texts[1] and streamed.stop_reason == whole.stop_reason


def test_ollama(served: Server) -> None:
    client = ollama.Client(served.url)
    shaped = client.chat("tiny", ASK, format=SCHEMA, options={"temperature": 1.0})
    jsonschema.validate(json.loads(shaped.message.content or ""), SCHEMA)
    greedy: Any = {"temperature": 0, "num_predict": 24}
    whole = client.generate("tiny", "the cat", options=greedy)
    parts = list(client.generate("tiny", "the cat", options=greedy, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert whole.eval_count is not None and 0 < whole.eval_count <= 24
    assert np.linalg.norm(client.embed("tiny", "the cat").embeddings[0]) > 0.999
    client._client.close()


def test_embeddings_beside_chats(served: Server) -> None:
    texts = ["the cat sat on the mat", "the dog", "the log " * 500]
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        first = client.embeddings.create(model="tiny", input=texts)
        with client.chat.completions.create(model="tiny", messages=ASK, max_tokens=64, stream=True) as chunks:
            next(iter(chunks))
            second = client.embeddings.create(model="tiny", input=texts[::-1])
    rows = np.array([entry.embedding for entry in first.data])
    beside = np.array([entry.embedding for entry in second.data])[::-1]
    # In bfloat16 a vector depends a little on what is computed beside it.
    assert ((rows * beside).sum(1) > 0.99).all() and (rows @ rows.T < 0.999).sum() == 6
    served.quiet()
