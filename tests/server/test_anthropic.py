"""The Messages API as Anthropic's own client sees it, over a model whose answers are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import msgspec
import pytest

from bough.base.messages import Finish
from bough.server.anthropic.schema import CountTokensRequest
from bough.server.anthropic.translate import chat_request

from .scripted import MODEL, Running, make_tokenizer, running_server

ASK: Any = [{"role": "user", "content": "weather?"}]
TOOL: Any = {
    "name": "get_weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nIt asks for weather.\n</think>\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(tool_parser="hermes", reasoning_parser="qwen3", api_key=("secret",)) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


def prompt_of(server: Running) -> str:
    return make_tokenizer().decode(server.client.seen[-1].prompt.tolist(), skip_special=False)


def test_text(server: Running, client: anthropic.Anthropic) -> None:
    server.client.answer_next = "sunny."
    answer = client.messages.create(
        model=MODEL, max_tokens=50, messages=ASK, extra_body={"temperature": 0.5, "top_k": 4},
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    )  # fmt: skip
    assert answer.id.startswith("msg_") and answer.role == "assistant" and answer.model == MODEL
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "sunny."}]
    assert answer.stop_reason == "end_turn" and answer.stop_sequence is None
    usage = answer.usage
    assert usage.output_tokens == 7 and usage.cache_read_input_tokens is not None
    params = server.client.seen[-1].params
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 4, 50)
    text = prompt_of(server)
    assert text == "<|system|>be brief<|end|><|user|>weather?<|end|><|assistant|>"
    total = usage.input_tokens + usage.cache_read_input_tokens
    assert total == len(server.client.seen[-1].prompt)
    counted = client.messages.count_tokens(model=MODEL, messages=ASK, system="be brief")
    assert counted.input_tokens == total


def test_stop_reasons(server: Running, client: anthropic.Anthropic) -> None:
    server.client.answer_next = "one two three"
    cut = client.messages.create(model=MODEL, max_tokens=4, messages=ASK)
    assert cut.stop_reason == "max_tokens" and cut.content[0].to_dict()["text"] == "one "
    server.client.answer_next = "one two three"
    stopped = client.messages.create(model=MODEL, max_tokens=64, messages=ASK, stop_sequences=["two"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
    # A bound beyond the context is no mistake in this API.
    server.client.answer_next = "x" * 5000
    long: Any = [{"role": "user", "content": "y" * 4000}]
    full = client.messages.create(model=MODEL, max_tokens=100_000, messages=long, timeout=60)
    assert full.stop_reason == "model_context_window_exceeded"


def test_stream_events(server: Running, client: anthropic.Anthropic) -> None:
    server.client.answer_next = f"{THOUGHT}I look.\n{CALL}"
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    events = list(
        client.messages.create(model=MODEL, max_tokens=2000, messages=ASK, tools=[TOOL], thinking=thinking, stream=True)
    )
    assert server.client.seen[-1].reasoning.budget == 1024
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    opened = None
    for event in events:
        if event.type == "content_block_start":
            assert opened is None
            opened = event.index
        elif event.type in ("content_block_delta", "content_block_stop"):
            assert event.index == opened
            opened = None if event.type == "content_block_stop" else opened
    start, delta = events[0], events[-2]
    assert start.message.usage.input_tokens + start.message.usage.cache_read_input_tokens == len(
        server.client.seen[-1].prompt
    )
    assert delta.delta.stop_reason == "tool_use" and delta.usage.output_tokens > 20


def test_stream_helper_equals_the_whole(server: Running, client: anthropic.Anthropic) -> None:
    fields: Any = {
        "model": MODEL, "max_tokens": 2000, "messages": ASK, "tools": [TOOL], "thinking": {"type": "adaptive"},
    }  # fmt: skip
    server.client.answer_next = f"{THOUGHT}I look.\n{CALL}"
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    server.client.answer_next = f"{THOUGHT}I look.\n{CALL}"
    whole = client.messages.create(**fields)
    for message in (streamed, whole):
        thought, text, call = message.content
        assert thought.type == "thinking" and "weather" in thought.thinking
        assert text.type == "text" and text.text.strip() == "I look."
        assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Paris"})
        assert message.stop_reason == "tool_use"


@pytest.mark.parametrize("text", ['{"city": tru}}\n</tool_call>', '"hello"}\n</tool_call>', '{"city": "Par', "{}}"])
def test_a_call_that_went_wrong_is_the_same_in_a_stream(
    server: Running, client: anthropic.Anthropic, text: str
) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 2000, "messages": ASK, "tools": [TOOL]}
    answer = f'<tool_call>\n{{"name": "get_weather", "arguments": {text}'
    server.client.answer_next = answer
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    server.client.answer_next = answer
    whole = client.messages.create(**fields)
    (call,), (other,) = whole.content, streamed.content
    assert call.type == other.type == "tool_use" and call.input == other.input
    assert (call.input == {}) == (text == "{}}")
    assert ("parse_error" in whole.to_dict()) == (text != "{}}")
    server.client.answer_next = answer
    lines = httpx.post(f"{server.url}/v1/messages", json={**fields, "stream": True}, headers={"x-api-key": "secret"})
    assert ('"parse_error"' in lines.text) == (text != "{}}")
    # The conversation goes on with what was answered.
    result: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "no"}]
    said: Any = [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": result}]
    client.messages.create(model=MODEL, max_tokens=1, messages=[*ASK, *said])


@pytest.mark.parametrize("enforced", [False, True])
def test_the_input_of_a_call_comes_as_it_is_written_where_it_cannot_go_wrong(
    server: Running, client: anthropic.Anthropic, enforced: bool
) -> None:
    choice: Any = {"type": "tool", "name": "get_weather"} if enforced else {"type": "auto"}
    fields: Any = {"model": MODEL, "max_tokens": 2000, "messages": ASK, "tools": [TOOL], "tool_choice": choice}
    server.client.answer_next = CALL.replace("Paris", "Paris, France")
    pieces, seen = [], []
    with client.messages.stream(**fields) as stream:
        for event in stream:
            if event.type == "input_json":
                pieces.append(event.partial_json)
                seen.append(event.snapshot)
        streamed = stream.get_final_message()
    assert json.loads("".join(pieces)) == {"city": "Paris, France"} == seen[-1]
    assert len(pieces) > 5 if enforced else len(pieces) == 1
    server.client.answer_next = CALL.replace("Paris", "Paris, France")
    whole = client.messages.create(**fields)
    (one,), (other,) = streamed.content, whole.content
    assert one.type == other.type == "tool_use" and one.input == other.input == {"city": "Paris, France"}


@pytest.mark.parametrize(("family", "covered"), [("glm-4.5", True), ("granite", False)])
def test_what_a_strict_tool_leaves_to_another_format_is_held_until_it_is_whole(family: str, covered: bool) -> None:
    """The grammar of tags knows a family's first format; granite's parser reads two more."""
    said = {
        "glm-4.5": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris, France</arg_value></tool_call>",
        "granite": '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris, France"}}]',
    }
    with (
        running_server(tool_parser=family) as server,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        for strict in (True, False):
            server.client.answer_next = said[family]
            tools: Any = [{**TOOL, "strict": strict}]
            with client.messages.stream(model=MODEL, max_tokens=2000, messages=ASK, tools=tools) as stream:
                pieces = [event.partial_json for event in stream if event.type == "input_json"]
            assert json.loads("".join(pieces)) == {"city": "Paris, France"}
            assert len([piece for piece in pieces if piece]) > 1 if covered and strict else len(pieces) == 1


def test_warnings(server: Running, client: anthropic.Anthropic) -> None:
    more: Any = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    server.client.fault_next = Finish("stop", warnings=("uniqueItems is not enforced",))
    whole: Any = client.messages.create(model=MODEL, max_tokens=9, messages=ASK, **more)
    assert whole.warnings == ["uniqueItems is not enforced"]
    server.client.fault_next = Finish("stop", warnings=("uniqueItems is not enforced",))
    events: Any = list(client.messages.create(model=MODEL, max_tokens=9, messages=ASK, stream=True, **more))
    assert events[-2].delta.warnings == whole.warnings


def test_a_call_that_is_cut_off_ends_its_stream(server: Running, client: anthropic.Anthropic) -> None:
    choice: Any = {"type": "any"}
    server.client.answer_next = CALL
    with client.messages.stream(
        model=MODEL, max_tokens=CALL.index("ris"), messages=ASK, tools=[TOOL], tool_choice=choice
    ) as stream:
        cut = stream.get_final_message()
    assert cut.stop_reason == "max_tokens" and cut.content[0].type == "tool_use"


def test_a_result_that_is_an_error_says_so(server: Running, client: anthropic.Anthropic) -> None:
    for text, shown in (("no such city", "Error: no such city"), ("Error 5", "Error 5")):
        history: Any = [
            *ASK, {"role": "assistant", "content": [
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": text}]},
        ]  # fmt: skip
        client.messages.create(model=MODEL, max_tokens=1, messages=history, tools=[TOOL])
        assert f"<|tool|>{shown}" in prompt_of(server)


def test_reasoning_is_shown_only_where_it_was_asked_for(server: Running, client: anthropic.Anthropic) -> None:
    server.client.answer_next = f"{THOUGHT}sunny."
    answer = client.messages.create(model=MODEL, max_tokens=2000, messages=ASK)
    assert [block.type for block in answer.content] == ["text"]


def test_history_of_calls(server: Running, client: anthropic.Anthropic) -> None:
    history: Any = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "and?"}]},
    ]  # fmt: skip
    client.messages.create(model=MODEL, max_tokens=8, messages=history, tools=[TOOL])
    text = prompt_of(server)
    assert text.index("I look.") < text.index("<|tool|>rain") < text.index("<|user|>and?")
    chat = chat_request(msgspec.convert({"messages": history, "tools": [TOOL]}, CountTokensRequest))
    call = {"id": "toolu_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}
    assert chat.messages[1:3] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
    ]


def test_cache_hints_travel_with_the_chat() -> None:
    hint = {"type": "ephemeral", "ttl": "1h"}
    body = {"messages": ASK, "system": [{"type": "text", "text": "x", "cache_control": hint}]}
    chat = chat_request(msgspec.convert(body, CountTokensRequest))
    assert chat.prompt_cache_options == {"mode": "explicit", "breakpoints": 1, "ttl": "1h", "messages": 1}


def test_prefilled_answer(server: Running, client: anthropic.Anthropic) -> None:
    prefilled: Any = [*ASK, {"role": "assistant", "content": "It is"}]
    client.messages.create(model=MODEL, max_tokens=4, messages=prefilled)
    assert prompt_of(server).endswith("<|assistant|>It is")


@pytest.mark.parametrize(("choice", "kind"), [({"type": "any"}, True), ({"type": "tool", "name": "get_weather"}, True),
                                              ({"type": "auto"}, False), ({"type": "none"}, False)])  # fmt: skip
def test_tool_choice(server: Running, client: anthropic.Anthropic, choice: Any, kind: bool) -> None:
    server.client.answer_next = CALL
    client.messages.create(model=MODEL, max_tokens=200, messages=ASK, tools=[TOOL], tool_choice=choice)
    assert (server.client.seen[-1].constraint is not None) == kind


def image(kind: str) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    return [{"role": "user", "content": [{"type": kind, "source": source}]}]


@pytest.mark.parametrize(("change", "named"), [
    ({"messages": image("image")}, "'image'"),
    ({"messages": image("document")}, "'document'"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"messages": []}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 9}, "temperature"),
    ({"regex": "a"}, "regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"custom_logit_processor": "x"}, "custom_logit_processor"),
])  # fmt: skip
def test_refusals(client: anthropic.Anthropic, change: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model=MODEL, max_tokens=8, messages=ASK, extra_body=change)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


def test_errors_have_anthropics_shape(server: Running, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="other", max_tokens=8, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]  # an object
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            stranger.messages.create(model=MODEL, max_tokens=8, messages=ASK)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    answer = httpx.post(f"{server.url}/v1/messages", json={"messages": ASK}, headers={"x-api-key": "secret"})
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


def test_an_error_within_a_stream(server: Running, client: anthropic.Anthropic) -> None:
    server.client.fault_next = Finish("error", message="it broke", status=500)
    with pytest.raises(anthropic.APIStatusError, match="it broke"):
        with client.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream:
            stream.get_final_message()


def test_asynchronous_client(server: Running) -> None:
    async def main() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="secret", max_retries=0) as client:

            async def one() -> str:
                async with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK) as stream:
                    return "".join([text async for text in stream.text_stream])

            return await asyncio.gather(*(one() for _ in range(4)))

    assert len(set(asyncio.run(main()))) == 1


def test_output_format(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = {
        "model": MODEL, "max_tokens": 50, "messages": ASK,
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }  # fmt: skip
    answer = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": "secret"})
    if answer.status_code == 400:  # until this server has a grammar
        pytest.skip(answer.json()["error"]["message"])
    constraint = server.client.seen[-1].constraint
    assert constraint is not None and json.loads(constraint.text) == schema
