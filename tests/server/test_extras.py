"""Fields of SGLang and vLLM, and what the answer repeats of the request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from .scripted import CONTEXT, EOS, MODEL, Running, expected_text, make_tokenizer, running_server, script

HELLO: Any = [{"role": "user", "content": "hello"}]
PROMPT = f"<|user|>hello{EOS}<|assistant|>"


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special=False)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("interval", [1, 4, 100])
def test_stream_interval(http: httpx.Client, interval: int) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "stream": True, "return_token_ids": True, "logprobs": 1}
    pieces = [e["choices"][0] for e in events(http.post("/v1/completions", json={**body, "stream_interval": interval}))]
    assert "".join(p["text"] for p in pieces) == expected_text(ids("hello"), 12)
    sizes = [len(p["token_ids"]) for p in pieces]
    assert sum(sizes) == 12 == sum(len(p["logprobs"]["tokens"]) for p in pieces)
    assert sizes[0] < 12 and all(size >= interval for size in sizes[1:-1])
    if interval > 1:
        assert len(sizes) <= 2 + 11 // interval
    native = {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 12, "stream_interval": interval}}
    texts = [e["text"] for e in events(http.post("/generate", json=native))]
    assert texts[-1] == expected_text(ids("hello"), 12) and (interval == 1 or len(texts) <= 2 + 11 // interval)


@pytest.mark.parametrize(("length", "side", "kept"), [
    (3, None, slice(-3, None)), (3, "left", slice(-3, None)), (3, "right", slice(0, 3)), (10**6, None, slice(None)),
])  # fmt: skip
def test_truncated_prompts(http: httpx.Client, length: int, side: str | None, kept: slice) -> None:
    more = {"truncate_prompt_tokens": length, "truncation_side": side, "max_tokens": 1, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json={"messages": HELLO, **more}).json()
    assert chat["prompt_token_ids"] == ids(PROMPT)[kept]
    whole = http.post("/v1/completions", json={"prompt": "hello there", "echo": True, **more}).json()["choices"][0]
    assert whole["prompt_token_ids"] == ids("hello there")[kept]
    assert whole["text"].startswith(make_tokenizer().decode(ids("hello there")[kept]))


def test_a_prompt_that_makes_room_for_its_answer(http: httpx.Client) -> None:
    body = {"prompt": "x" * 5000, "truncate_prompt_tokens": -1, "max_tokens": 10, "return_token_ids": True}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert len(choice["prompt_token_ids"]) == CONTEXT - 10 and choice["finish_reason"] == "length"
    for wrong in (0, -2):
        answer = http.post("/v1/completions", json={"prompt": "a", "truncate_prompt_tokens": wrong})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_echo_of_the_last_message(http: httpx.Client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Sure, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 3}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    echoed = http.post("/v1/chat/completions", json={**body, "echo": True})
    assert echoed.json()["choices"][0]["message"]["content"] == "Sure, " + plain
    stream = events(http.post("/v1/chat/completions", json={**body, "echo": True, "stream": True}))
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in stream) == "Sure, " + plain
    other = http.post("/v1/chat/completions", json={"messages": HELLO, "echo": True, "max_tokens": 3}).json()
    assert other["choices"][0]["message"]["content"] == expected_text(ids(PROMPT), 3)


def test_ids_in_place_of_messages(http: httpx.Client) -> None:
    body = {"messages": HELLO, "input_ids": ids("other"), "max_tokens": 2, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["token_ids"] == [script(ids("other"), None, i) for i in range(2)]
    wrong = http.post("/v1/chat/completions", json={**body, "input_ids": [10**9]})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "input_ids"
    # The messages are not read then, whatever they are.
    for messages in ([], [{"role": "assistant", "content": [1], "tool_calls": 5}]):
        again = http.post("/v1/chat/completions", json={**body, "messages": messages})
        assert again.json()["choices"] == answer["choices"], again.text
    for name in ("echo", "continue_final_message"):
        wrong = http.post("/v1/chat/completions", json={**body, "messages": [], name: True})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == name


def test_a_refused_answer_in_a_conversation_is_what_it_said(server: Running, http: httpx.Client) -> None:
    for refused in ({"content": None, "refusal": "no"}, {"refusal": "no"}):
        messages = [*HELLO, {"role": "assistant", **refused}, *HELLO]
        http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).raise_for_status()
        prompt = make_tokenizer().decode(server.client.seen[-1].prompt.tolist(), skip_special=False)
        assert "<|assistant|>no" in prompt


def test_what_the_answer_repeats(client: openai.OpenAI) -> None:
    more: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1, "metadata": {"a": "b"}, "service_tier": "flex"}
    answer = client.chat.completions.create(**more)
    assert answer.metadata == {"a": "b"} and answer.service_tier == "default"
    assert all(chunk.service_tier == "default" for chunk in client.chat.completions.create(**more, stream=True))
    with pytest.raises(openai.BadRequestError) as many:
        client.chat.completions.create(**{**more, "metadata": {str(i): "" for i in range(17)}})
    assert many.value.param == "metadata"


@pytest.mark.parametrize("bias", [{"abc": 1}, {"5": "x"}, {"5": 200}, {"-1": 1}, {"1e9": 1}, [5]])
def test_a_wrong_bias_names_its_field(http: httpx.Client, bias: Any) -> None:
    answer = http.post("/v1/completions", json={"prompt": "a", "logit_bias": bias})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"


def test_an_aborted_request_is_an_error_that_clients_know() -> None:
    async def main(slow: Running) -> None:
        async with openai.AsyncOpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=2) as client:
            endless: Any = {"model": MODEL, "messages": HELLO, "extra_body": {"ignore_eos": True, "rid": "endless"}}
            whole = asyncio.create_task(client.chat.completions.create(**endless))
            while not slow.client.running:
                await asyncio.sleep(0.005)
            async with httpx.AsyncClient(base_url=slow.url) as http:
                await http.post("/abort_request", json={"rid": "endless"})
            with pytest.raises(openai.BadRequestError) as aborted:
                await whole
            assert aborted.value.code == "aborted" and len(slow.client.seen) == 1  # nobody tried again
            said: Any = aborted.value.body
            assert said["usage"]["prompt_tokens"] > 0 and said["usage"]["completion_tokens"] >= 0

    with running_server(0.01) as slow:
        asyncio.run(main(slow))


def test_the_text_of_the_prompt(http: httpx.Client) -> None:
    body = {"messages": HELLO, "max_tokens": 3, "return_prompt_text": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_text"] == PROMPT
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    assert [chunk.get("prompt_text") for chunk in chunks] == [PROMPT, *[None] * (len(chunks) - 1)]


CHAT, COMPLETION, RESPONSE = {"messages": HELLO}, {"prompt": "a"}, {"input": "a"}


@pytest.mark.parametrize(("path", "body", "names"), [
    ("chat/completions", CHAT, ("add_special_tokens", "task", "return_meta_info", "return_input_ids_in_sglext",
                                "return_output_ids_in_sglext", "sampling_logprobs_mode", "return_weight_versions",
                                "return_flat_raw_output_top_logprobs", "return_spec_tokens_details", "vllm_xargs")),
    ("completions", COMPLETION, ("return_cached_tokens_details", "return_spec_tokens_details", "vllm_xargs")),
    ("responses", RESPONSE, ("previous_input_messages", "enable_response_messages", "request_id")),
])  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    for name in names:
        answer = http.post(f"/v1/{path}", json={**body, name: "x"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text
        assert http.post(f"/v1/{path}", json={**body, name: False}).status_code == 200


@pytest.mark.parametrize(("path", "fields", "param", "words"), [
    ("chat/completions", CHAT | {"max_completion_tokens": 10**6}, "max_completion_tokens", "1000000"),
    ("chat/completions", CHAT | {"max_completion_tokens": 2**63 - 1}, "max_completion_tokens", "9223372036854775807"),
    ("chat/completions", CHAT | {"max_completion_tokens": -1}, "max_completion_tokens", "[0, 9223372036854775808]"),
    ("chat/completions", CHAT | {"max_tokens": 10**6}, "max_tokens", "1000000"),
    ("chat/completions", CHAT | {"prompt_cache_retention": "x"}, "prompt_cache_retention", "time to live"),
    ("responses", RESPONSE | {"prompt_cache_options": {"comparison_response_id": "x"}}, "prompt_cache_options",
     "usage"),
])  # fmt: skip
def test_errors_name_the_field_that_was_sent(
    http: httpx.Client, path: str, fields: Any, param: str, words: str
) -> None:
    for stream in (False, True):
        error = http.post(f"/v1/{path}", json={**fields, "stream": stream}).json()["error"]
        assert error["param"] == param and words in error["message"], error


@pytest.mark.parametrize("parameters", [
    {"type": "objec"}, {"type": "object", "properties": {"a": {"type": ["string", "nil"]}}}, {"properties": [1]},
    {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "float"}]}}}},
    {"type": {}}, {"$defs": {"a": 5}}, {"required": "a"}, {"anyOf": {}}, {"type": "string"},
])  # fmt: skip
def test_parameters_that_are_no_schema_are_refused(http: httpx.Client, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    error = http.post("/v1/chat/completions", json=CHAT | {"tools": tools}).json()["error"]
    assert error["param"] == "tools[0].function.parameters" and "no JSON Schema" in error["message"]


def test_bounds_of_constraints_are_each_tools_own(http: httpx.Client) -> None:
    steps = [{"type": "object", "properties": {"n": {"type": "integer", "multipleOf": n}}} for n in (7, 60, 11, 13, 17)]
    null = {"type": None, "properties": {"d": {"type": "string", "format": "date", "allOf": None}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": p}} for i, p in enumerate((*steps, null))]
    answer = http.post("/v1/chat/completions", json=CHAT | {"tools": tools, "tool_choice": "required", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_parameters_may_be_sloppy_but_sound(http: httpx.Client) -> None:
    types = {"type": "object", "properties": {"type": {"type": ["string", "null"], "enum": None}, "properties": True}}
    node = {"$defs": {"n": {"type": "object", "properties": {"required": {"$ref": "#/$defs/n"}}}}, "items": None}
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in (("f", types), ("g", node))]
    assert http.post("/v1/chat/completions", json=CHAT | {"tools": tools, "max_tokens": 1}).status_code == 200


def test_lists_know_two_orders(http: httpx.Client) -> None:
    made = http.post("/v1/responses", json=RESPONSE | {"max_output_tokens": 1}).json()
    for path in (f"responses/{made['id']}/input_items", "files", "batches"):
        assert http.get(f"/v1/{path}?order=zz").json()["error"]["param"] == "order", path
