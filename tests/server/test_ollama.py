"""Ollama's API as its own client sees it, over a model whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from bough.base.messages import Finish

from .scripted import MODEL, Running, make_tokenizer, running_server

ASK: Any = [{"role": "user", "content": "weather?"}]
TOOL: Any = {"type": "function", "function": {
    "name": "get_weather", "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nIt asks for weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(tool_parser="hermes", reasoning_parser="qwen3") as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[ollama.Client]:
    made = ollama.Client(server.url)
    yield made
    made._client.close()


def prompt_of(server: Running) -> str:
    return make_tokenizer().decode(server.client.seen[-1].prompt.tolist(), skip_special=False)


def test_chat(server: Running, client: ollama.Client) -> None:
    server.client.answer_next = "sunny."
    options = {
        "num_predict": 50, "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "seed": 3, "stop": ["zz"],
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repeat_penalty": 1.3, "num_ctx": 2048,
    }  # fmt: skip
    answer = client.chat(MODEL, ASK, options=options, keep_alive="5m")
    assert answer.message.role == "assistant" and answer.message.content == "sunny."
    assert answer.done and answer.done_reason == "stop" and answer.model == MODEL
    assert answer.prompt_eval_count == len(server.client.seen[-1].prompt) and answer.eval_count == 7
    total = answer.total_duration
    assert total is not None and answer.prompt_eval_duration is not None and answer.eval_duration is not None
    assert 0 < answer.prompt_eval_duration + answer.eval_duration <= total < 20e9
    p = server.client.seen[-1].params
    assert (p.max_tokens, p.temperature, p.top_k, p.top_p, p.min_p, p.seed) == (50, 0.5, 7, 0.8, 0.1, 3)
    assert p.stop == ("zz",)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.1, 0.2, 1.3)


def test_stream_equals_the_whole(server: Running, client: ollama.Client) -> None:
    for kind in ("chat", "generate"):
        server.client.answer_next = "sunny then rain."
        call: Any = (lambda **k: client.chat(MODEL, ASK, **k)) if kind == "chat" else (
            lambda **k: client.generate(MODEL, "weather?", **k))  # fmt: skip
        parts = list(call(stream=True))
        server.client.answer_next = "sunny then rain."
        whole = call()
        texts = [part.message.content if kind == "chat" else part.response for part in parts]
        assert "".join(texts) == (whole.message.content if kind == "chat" else whole.response) == "sunny then rain."
        assert len(parts) > 5 and [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].done_reason == "stop" and parts[-1].eval_count == whole.eval_count


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_went_wrong_comes_with_the_reason(server: Running, stream: bool) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": [TOOL], "stream": stream}
    server.client.answer_next = '<tool_call>\n{"name": "get_weather", "arguments": {"city": tru}}\n</tool_call>'
    lines = httpx.post(f"{server.url}/api/chat", json=body).text.splitlines()
    messages = [json.loads(line) for line in lines]
    (call,) = [call for line in messages for call in line["message"].get("tool_calls", ())]
    assert call["function"]["arguments"] == {"raw_arguments": '{"city": tru}'}
    assert messages[-1]["parse_error"] == "the arguments are not a valid JSON object"


@pytest.mark.parametrize("stream", [False, True])
def test_warnings(server: Running, stream: bool) -> None:
    server.client.fault_next = Finish("stop", warnings=("uniqueItems is not enforced",))
    body = {"model": MODEL, "messages": ASK, "format": {"type": "object"}, "stream": stream}
    last = httpx.post(f"{server.url}/api/chat", json=body).text.splitlines()[-1]
    assert json.loads(last)["warnings"] == ["uniqueItems is not enforced"]


def test_streams_are_lines_of_json(server: Running) -> None:
    answer = httpx.post(f"{server.url}/api/generate", json={"model": f"{MODEL}:latest", "prompt": "a"})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line)["done"] for line in answer.text.splitlines()][-1] is True


def test_length(server: Running, client: ollama.Client) -> None:
    server.client.answer_next = "one two three"
    assert client.generate(MODEL, "a", options={"num_predict": 4}).done_reason == "length"


def test_defaults_are_ollamas(server: Running, client: ollama.Client) -> None:
    client.generate(MODEL, "a", options={"num_predict": -1, "seed": -1})
    p = server.client.seen[-1].params
    assert (p.temperature, p.top_k, p.top_p, p.max_tokens, p.seed) == (0.8, 40, 0.9, None, None)


def test_generate_uses_the_template_unless_raw(server: Running, client: ollama.Client) -> None:
    client.generate(MODEL, "hello", system="be brief", options={"num_predict": 2})
    assert prompt_of(server) == "<|system|>be brief<|end|><|user|>hello<|end|><|assistant|>"
    client.generate(MODEL, "hello", raw=True, options={"num_predict": 2})
    assert prompt_of(server) == "hello"


def test_calls(server: Running, client: ollama.Client) -> None:
    for stream in (False, True):
        server.client.answer_next = f"I look.\n{CALL}\n{CALL}"
        answer: Any = client.chat(MODEL, ASK, tools=[TOOL], stream=stream)
        parts = list(answer) if stream else [answer]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [(c.function.name, c.function.arguments) for c in calls] == [("get_weather", {"city": "Paris"})] * 2
        assert "".join(part.message.content or "" for part in parts).strip() == "I look."
    history: Any = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}]},
        {"role": "tool", "tool_name": "get_weather", "content": "rain"},
    ]
    client.chat(MODEL, history, tools=[TOOL], options={"num_predict": 2})
    text = prompt_of(server)
    assert text.index("weather?") < text.index("<|tool|>rain")


def test_thinking(server: Running, client: ollama.Client) -> None:
    for think, told in ((True, "It asks for weather."), (None, "It asks for weather."), (False, None)):
        server.client.answer_next = f"{THOUGHT}sunny."
        message = client.chat(MODEL, ASK, think=think).message
        assert message.content == "sunny." and (message.thinking or "").strip() == (told or "")


def test_thinking_of_a_model_that_does_not() -> None:
    with running_server(reasoning_parser="none") as server:
        answer = httpx.post(f"{server.url}/api/chat", json={"model": MODEL, "messages": ASK, "think": True})
        assert answer.status_code == 400 and "does not support thinking" in answer.json()["error"]


def test_logprobs(server: Running, client: ollama.Client) -> None:
    answer = client.generate(MODEL, "a", logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    assert answer.logprobs[0].top_logprobs is not None and len(answer.logprobs[0].top_logprobs) == 2


def test_about(server: Running, client: ollama.Client) -> None:
    (model,) = client.list().models
    assert model.model == MODEL and model.digest is not None and len(model.digest) == 64
    shown = client.show(f"{MODEL}:latest")
    assert shown.capabilities == ["completion", "tools", "thinking", "embedding"] and shown.template is not None
    assert shown.modelinfo is not None and shown.modelinfo["general.architecture"] == "scripted"
    (running,) = client.ps().models
    assert running.model == MODEL and running.context_length == 4096
    with httpx.Client(base_url=server.url) as http:
        assert http.get("/").text == "Ollama is running" and http.head("/").status_code == 200
        assert http.get("/api/version").json()["version"]


def test_embeddings(server: Running, client: ollama.Client) -> None:
    found = client.embed(MODEL, ["the cat", "the cat", "x"])
    first, second, other = found.embeddings
    assert first == second != other and sum(v * v for v in first) == pytest.approx(1)
    assert found.prompt_eval_count == 15
    assert len(client.embed(MODEL, "the cat", dimensions=4).embeddings[0]) == 4
    assert client.embed(MODEL, "y" * 5000).prompt_eval_count == 4096
    with pytest.raises(ollama.ResponseError, match="context length"):
        client.embed(MODEL, "y" * 5000, truncate=False)
    assert client.embed(MODEL, []).embeddings == []
    # The older way gives the vector as the model computed it.
    assert sum(client.embeddings(MODEL, "the cat").embedding) == 7


@pytest.mark.parametrize(("change", "words"), [
    ({"options": {"num_predict": 10**6, "num_ctx": 5}, "raw": True, "prompt": "x" * 5000}, "context length"),
    ({"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
    ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty must be in"),
    ({"options": {"seed": 2**70}}, "options.seed must be in"),
])  # fmt: skip
def test_errors_speak_of_this_api(server: Running, change: Any, words: str) -> None:
    answer = httpx.post(f"{server.url}/api/generate", json={"model": MODEL, "prompt": "a", **change})
    assert answer.status_code == 400 and words in answer.json()["error"], answer.text


def test_no_repeat_penalty(server: Running, client: ollama.Client) -> None:
    for last_n, penalty in ((0, 1.0), (-1, 1.3)):
        client.generate(MODEL, "a", options={"repeat_penalty": 1.3, "repeat_last_n": last_n, "num_predict": 1})
        assert server.client.seen[-1].params.repetition_penalty == penalty


def test_an_unknown_route_answers_as_its_neighbours(server: Running) -> None:
    assert isinstance(httpx.post(f"{server.url}/api/nothing", json={}).json()["error"], str)
    other = httpx.post(f"{server.url}/v1/messages/batches", json={}).json()
    assert (other["type"], other["error"]["type"]) == ("error", "not_found_error")


def test_loading(client: ollama.Client) -> None:
    assert client.generate(MODEL).done_reason == "load"
    assert client.chat(MODEL, []).done_reason == "load"


@pytest.mark.parametrize("change", [
    {"options": {"mirostat": 1}}, {"options": {"typical_p": 0.5}}, {"options": {"temperature": 9}},
    {"options": {"tfs_z": 0.5}}, {"options": {"repeat_last_n": 64}},
    {"options": {"top_k": "x"}}, {"suffix": "b"}, {"context": [1]}, {"images": ["aGk="]}, {"template": "x"},
    {"regex": "a"}, {"structured_outputs": {"regex": "a"}}, {"guided_choice": ["a"]}, {"response_format": {}},
    {"json_schema": False}, {"custom_logit_processor": "x"},
])  # fmt: skip
def test_refusals(server: Running, change: Any) -> None:
    answer = httpx.post(f"{server.url}/api/generate", json={"model": MODEL, "prompt": "a", **change})
    assert answer.status_code == 400 and next(iter(change.get("options", change))) in answer.json()["error"]


def test_errors(server: Running, client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat("other", ASK)
    assert missing.value.status_code == 404 and "other" in missing.value.error
    with pytest.raises(ollama.ResponseError, match="neither added nor removed"):
        client.pull("other")
    with pytest.raises(ollama.ResponseError, match="neither added nor removed"):
        client.delete("other")
    server.client.fault_next = Finish("error", message="it broke", status=500)
    with pytest.raises(ollama.ResponseError, match="it broke"):
        list(client.chat(MODEL, ASK, stream=True))


def test_format(server: Running, client: ollama.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for form in ("json", schema):
        try:
            client.chat(MODEL, ASK, format=form)
        except ollama.ResponseError as error:  # until this server has a grammar
            pytest.skip(error.error)
        constraint = server.client.seen[-1].constraint
        assert constraint is not None and constraint.kind == ("json_object" if form == "json" else "json_schema")
        assert constraint.strict


def test_asynchronous_client(server: Running) -> None:
    async def main() -> list[str]:
        client = ollama.AsyncClient(server.url)

        async def one() -> str:
            return "".join([p.message.content or "" async for p in await client.chat(
                MODEL, ASK, stream=True, options={"seed": 1})])  # fmt: skip

        texts = await asyncio.gather(*(one() for _ in range(4)))
        await client._client.aclose()
        return texts

    assert len(set(asyncio.run(main()))) == 1
