"""Tools of chat completions as the openai client sees them, over a model whose answers are scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from bough.base.constraint import Constraint
from bough.base.errors import ConfigError
from bough.base.messages import Finish
from bough.server.service import check_config
from bough.server.thinking import reasoning_of
from bough.text.formats import AnswerFormat
from bough.text.reasoning.families import of_tags

from .answers import ASK, CALL, NOW, THOUGHT, TIME, TOOLS, WEATHER, answering, sent
from .scripted import EOS, MODEL, Running, make_config, make_tokenizer, running_server


@pytest.fixture
def client(hermes: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_calls(hermes: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**answering(hermes, f"I look.\n{CALL}\n{NOW}"), tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    first, second = choice.message.tool_calls or []
    assert first.type == second.type == "function"
    assert first.id.startswith("call_") and len(first.id) == 29 and first.id != second.id
    assert (first.function.name, json.loads(first.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert (second.function.name, second.function.arguments) == ("get_time", "{}")


def test_calls_alone_have_no_content(hermes: Running, client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**answering(hermes, CALL), tools=TOOLS).choices[0].message
    assert message.content is None and len(message.tool_calls or []) == 1


def test_stream_of_calls(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, f"I look.\n{CALL}\n{NOW}")
    chunks = [c.choices[0] for c in client.chat.completions.create(**fields, tools=TOOLS, stream=True)]
    assert chunks[0].delta.role == "assistant" and all(c.delta.role is None for c in chunks[1:])
    assert "".join(c.delta.content or "" for c in chunks) == "I look."
    calls = [call for c in chunks for call in c.delta.tool_calls or ()]
    for index, name in enumerate(("get_weather", "get_time")):
        head, *rest = [call for call in calls if call.index == index]
        assert head.id and head.type == "function" and head.function is not None
        assert (head.function.name, head.function.arguments) == (name, "")
        assert all(call.id is None and call.type is None for call in rest)
        assert all(call.function is not None and call.function.name is None for call in rest)
    assert len([call for call in calls if call.index == 0]) > 10  # fragments, not the whole at the end
    assert chunks[-1].finish_reason == "tool_calls" and chunks[-1].delta.tool_calls is None


class GetWeather(BaseModel):
    city: str


def test_stream_helper_and_pydantic_tools(hermes: Running, client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    fields = answering(hermes, f"{THOUGHT}{CALL}", CALL)
    events = []
    with client.chat.completions.stream(**fields, tools=[tool]) as stream:
        for event in stream:
            events.append(event.type)
        answer = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or []
        assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_parse_with_pydantic_tools(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, CALL)
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    (call,) = client.chat.completions.parse(**fields, tools=[tool]).choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    # Strict tools are held to their schema wherever the model calls one.
    constraint = sent(hermes, fields).constraint
    assert isinstance(constraint, Constraint) and constraint.kind == "structural_tag"
    tags = json.loads(constraint.text)
    assert tags["triggers"] == ["<tool_call>"] and "at_least_one" not in tags
    assert tags["structures"][0]["begin"] == '<tool_call>\n{"name": "get_weather", "arguments": '
    assert tags["structures"][0]["schema"]["required"] == ["city"] and tags["structures"][0]["end"] == "}\n</tool_call>"


@pytest.mark.parametrize(("choice", "names", "more"), [
    ("required", ["get_weather", "get_time"], True),
    ({"type": "function", "function": {"name": "get_time"}}, ["get_time"], False),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "get_weather"}}]}}, ["get_weather"], True),
])  # fmt: skip
def test_forced_calls_are_constrained(
    hermes: Running, client: openai.OpenAI, choice: Any, names: list[str], more: bool
) -> None:
    fields = answering(hermes, CALL)
    client.chat.completions.create(**fields, tools=TOOLS, tool_choice=choice)
    constraint = sent(hermes, fields).constraint
    assert constraint.kind == "grammar"
    assert [name for name in ("get_weather", "get_time") if name in constraint.text] == names
    assert (")*" in constraint.text) == more
    # The model may think before it calls, as its prompt neither began nor forbade that.
    assert "thinking?" in constraint.text and sent(hermes, fields).reasoning is None


def test_choice_none_hides_the_tools(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, CALL)
    choice = client.chat.completions.create(**fields, tools=TOOLS, tool_choice="none").choices[0]
    assert choice.message.content == CALL and choice.message.tool_calls is None and choice.finish_reason == "stop"
    assert "get_weather" not in make_tokenizer().decode(sent(hermes, fields).prompt.tolist())


def test_allowed_tools_are_the_only_ones(hermes: Running, client: openai.OpenAI) -> None:
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TIME]}}
    fields = answering(hermes, CALL)
    choice = client.chat.completions.create(**fields, tools=TOOLS, tool_choice=allowed).choices[0]
    assert choice.message.content == CALL and choice.message.tool_calls is None
    assert choice.model_extra is not None and "not among the tools" in choice.model_extra["parse_error"]
    assert "get_weather" in make_tokenizer().decode(sent(hermes, fields).prompt.tolist())


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_parallel_ones_are_off(hermes: Running, client: openai.OpenAI, stream: bool) -> None:
    fields = answering(hermes, f"{CALL}\n{NOW}")
    answer: Any = client.chat.completions.create(**fields, tools=TOOLS, parallel_tool_calls=False, stream=stream)
    if stream:
        chunks = list(answer)
        assert {call.index for c in chunks for call in c.choices[0].delta.tool_calls or ()} == {0}
        reason = chunks[-1].choices[0].model_extra["parse_error"]
    else:
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather"]
        reason = answer.choices[0].model_extra["parse_error"]
    assert "'get_time'" in reason and "one call" in reason


@pytest.mark.parametrize("arguments", ['{"city": "Par', "hello", "[1]", '{"city": tru}'])
def test_a_call_that_went_wrong_can_be_told_again(hermes: Running, client: openai.OpenAI, arguments: str) -> None:
    function = {"name": "get_weather", "arguments": arguments}
    said: Any = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    fields = answering(hermes, "ok") | {"messages": [*ASK, said, {"role": "tool", "tool_call_id": "a", "content": "1"}]}
    assert client.chat.completions.create(**fields, tools=TOOLS).choices[0].message.content == "ok"
    prompt = make_tokenizer().decode(sent(hermes, fields).prompt.tolist())
    assert json.dumps({"raw_arguments": arguments}) in prompt


def test_large_numbers_are_told_again_as_they_were(hermes: Running, client: openai.OpenAI) -> None:
    text = '{"city": 100000000000000000000, "days": 1.0}'
    function = {"name": "get_weather", "arguments": text}
    said: Any = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    fields = answering(hermes, "ok") | {"messages": [*ASK, said]}
    client.chat.completions.create(**fields, tools=TOOLS)
    assert text in make_tokenizer().decode(sent(hermes, fields).prompt.tolist())
    for depth in (300, 3000):
        function["arguments"] = '{"a": ' + "[" * depth + "]" * depth + "}"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**answering(hermes, "ok") | {"messages": [*ASK, said]}, tools=TOOLS)


def test_a_cut_off_call_ends_with_length(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, CALL)
    choice = client.chat.completions.create(**fields, tools=TOOLS, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or []
    assert '{"city": "Paris"}'.startswith(call.function.arguments)  # type: ignore[union-attr]


def test_what_cannot_be_read_comes_as_text_with_the_reason(hermes: Running, client: openai.OpenAI) -> None:
    text = '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>'
    for stream in (False, True):
        answer: Any = client.chat.completions.create(**answering(hermes, text), tools=TOOLS, stream=stream)
        if stream:
            chunks = [c.choices[0] for c in answer]
            content, last = "".join(c.delta.content or "" for c in chunks), chunks[-1]
        else:
            content, last = answer.choices[0].message.content, answer.choices[0]
        assert content == text and last.finish_reason == "stop"
        assert last.model_extra["parse_error"] == "the arguments are not an object"


def test_legacy_functions(hermes: Running, client: openai.OpenAI) -> None:
    functions: Any = [WEATHER["function"], TIME["function"]]
    fields = answering(hermes, CALL)
    choice = client.chat.completions.create(**fields, functions=functions).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.function_call is not None
    assert choice.message.function_call.name == "get_weather" and choice.message.tool_calls is None
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    fields = answering(hermes, NOW)
    chunks = list(
        client.chat.completions.create(**fields, functions=functions, function_call={"name": "get_time"}, stream=True)
    )
    pieces = [c.choices[0].delta.function_call for c in chunks if c.choices[0].delta.function_call is not None]
    assert [piece.name for piece in pieces] == ["get_time"] + [None] * (len(pieces) - 1)
    assert "".join(piece.arguments or "" for piece in pieces) == "{}"
    assert sent(hermes, fields).constraint.kind == "grammar" and chunks[-1].choices[0].finish_reason == "function_call"


def test_past_calls_reach_the_template(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, "Sunny.")
    weather = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    past = {"id": "call_1", "type": "function", "function": weather}
    fields["messages"] = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "get_time", "arguments": "{}"}},
        {"role": "function", "name": "get_time", "content": "noon"},
    ]  # fmt: skip
    assert client.chat.completions.create(**fields, tools=TOOLS).choices[0].message.content == "Sunny."
    prompt = make_tokenizer().decode(sent(hermes, fields).prompt.tolist(), skip_special=False)
    assert f"<|tool|>sunny{EOS}" in prompt and f"<|tool|>noon{EOS}" in prompt


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TIME, TIME]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 70_000}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": TOOLS, "functions": [TIME["function"]]}, "functions"),
    ({"functions": [TIME["function"]], "function_call": {"name": "x"}}, "function_call"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[1].tool_calls[0]"),
    ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
     "messages[1].tool_calls[0].function"),
])  # fmt: skip
def test_refusals_name_the_field(hermes: Running, fields: Any, param: str) -> None:
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", json={"messages": ASK, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_parse_function_call(hermes: Running) -> None:
    def parse(**body: Any) -> Any:
        return httpx.post(f"{hermes.url}/parse_function_call", json=body).json()

    call = {"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Paris"}'}
    assert parse(text=f"So.\n{CALL}", tools=TOOLS) == {"normal_text": "So.", "calls": [call], "parse_error": None}
    llama = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert parse(text=llama, tools=TOOLS, tool_call_parser="llama3")["calls"] == [call]
    assert parse(text=CALL, tools=[TIME])["normal_text"] == CALL
    assert parse(text=CALL, tools=[TIME])["parse_error"]
    assert parse(text="x", tool_call_parser="unheard")["error"]["param"] == "tool_call_parser"


def test_unknown_parsers_stop_the_start() -> None:
    with pytest.raises(ConfigError, match="unknown tool parser"):
        check_config(make_config(tool_parser="unheard"))
    with pytest.raises(ConfigError, match="unknown reasoning parser"):
        check_config(make_config(reasoning_parser="unheard"))


@pytest.mark.parametrize(("fields", "kind", "message", "param", "told"), [
    ({"tools": [WEATHER, TIME], "tool_choice": "required"}, "grammar",
     "grammar: at 4(9), rule call_1: failed to compile JSON schema: it is odd", "tools[1].function.parameters",
     "the parameters of the tool 'get_time': it is odd"),
    ({"tools": [WEATHER, TIME], "tool_choice": "required"}, "grammar", "grammar: it is odd", "tools",
     "grammar: it is odd"),
    ({"functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}, "grammar",
     "grammar: it is odd", "functions[0].parameters", "the parameters of the tool 'get_weather': grammar: it is odd"),
    ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "grammar", "grammar: it is odd",
     "response_format", "grammar: it is odd"),
    ({"response_format": {"type": "json_object"}}, "json_object", "it is odd", "response_format", "it is odd"),
    ({"structured_outputs": {"regex": "a"}}, "regex", "it is odd", "structured_outputs.regex", "it is odd"),
    ({"tools": [WEATHER], "guided_grammar": "start: \"a\""}, "grammar", "it is odd", "guided_grammar", "it is odd"),
])  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_names_the_field(
    hermes: Running, fields: Any, kind: str, message: str, param: str, told: str, stream: bool
) -> None:
    hermes.client.fault_next = Finish("error", message=message, status=400, param=kind)
    body = {"model": MODEL, "messages": ASK, "stream": stream, **fields}
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", json=body)
    error = answer.json() if not stream else json.loads(answer.text.split("data: ")[-2])
    assert (error["error"]["param"], error["error"]["message"]) == (param, told)


def test_a_constraint_begins_on_the_channel_of_answers() -> None:
    asked = {"response_format": {"type": "json_object"}}
    said = '<|channel|>final<|message|>{"a": 1}'
    with running_server(reasoning_parser="gpt-oss", tool_parser="gpt-oss") as server:
        for fields, budget in (({}, None), ({"thinking_token_budget": 9}, 9)):
            server.client.answer_next = said
            body = {"model": MODEL, "messages": ASK, "max_tokens": 200, **asked, **fields}
            message = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0]["message"]
            assert message["content"] == '{"a": 1}'
            reasoning = server.client.seen[-1].reasoning
            assert reasoning is not None and reasoning.budget == budget and not reasoning.begin
            assert make_tokenizer().decode(list(reasoning.end)) == "<|channel|>final<|message|>"
        server.client.answer_next = said
        httpx.post(f"{server.url}/v1/chat/completions", json={"model": MODEL, "messages": ASK, "max_tokens": 200})
        assert server.client.seen[-1].reasoning is None


def test_a_constrained_answer_is_what_is_on_its_channel() -> None:
    said = '<|channel|>commentary<|message|>I will answer.<|start|>assistant<|channel|>final<|message|>{"a": 1}'
    asked = {"type": "json_object"}
    schema: Any = {"type": "object"}
    with running_server(reasoning_parser="gpt-oss", tool_parser="gpt-oss") as server:

        def post(path: str, fields: dict[str, Any]) -> Any:
            server.client.answer_next = said
            reply = httpx.post(server.url + path, json={"model": MODEL, "messages": ASK, "max_tokens": 200, **fields})
            assert reply.status_code == 200, reply.text
            return reply

        for tools in ({}, {"tools": TOOLS}):
            choice = post("/v1/chat/completions", {"response_format": asked, **tools}).json()["choices"][0]
            assert (choice["message"]["content"], choice["message"]["reasoning"]) == ('{"a": 1}', "I will answer.")
        choice = post("/v1/chat/completions", {}).json()["choices"][0]
        assert choice["message"]["content"] == 'I will answer.\n{"a": 1}'
        events = post("/v1/chat/completions", {"response_format": asked, "stream": True}).text.split("data: ")[1:-1]
        deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == '{"a": 1}'
        assert "".join(delta.get("reasoning") or "" for delta in deltas) == "I will answer."
        form = {"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}
        items = post("/v1/responses", {"input": "weather?", **form}).json()["output"]
        assert items[0]["type"] == "reasoning" and items[1]["content"][0]["text"] == '{"a": 1}'
        config = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        blocks = post("/v1/messages", config).json()["content"]
        assert [block["text"] for block in blocks if block["type"] == "text"] == ['{"a": 1}']
        message = post("/api/chat", {"format": "json", "stream": False}).json()["message"]
        assert message["content"] == '{"a": 1}' and message["thinking"] == "I will answer."


def test_a_call_that_must_come_is_no_answer_in_another_language(hermes: Running) -> None:
    for fields, named in (
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
    ):
        body = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "tool_choice": "required", **fields}
        answer = httpx.post(f"{hermes.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == named, answer.text


@pytest.mark.parametrize(("fields", "named"), [
    ({}, ""), ({"json_object": False}, ""), ({"json": {}, "backend": "outlines"}, ".backend"),
    ({"json": {}, "disable_additional_properties": True}, ".disable_additional"),
])  # fmt: skip
def test_structured_outputs_that_would_mean_nothing(hermes: Running, fields: Any, named: str) -> None:
    body = {"model": MODEL, "messages": ASK, "structured_outputs": fields}
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400 and f"structured_outputs{named}" in answer.json()["error"]["param"], answer.text


def test_a_model_that_decides_may_think_before_its_constraint() -> None:
    tokenizer = make_tokenizer()
    mark = tokenizer.special_tokens[0]
    one, several = (AnswerFormat(None, of_tags(opens, "</think>")) for opens in (mark, "<think>"))
    for form, optional, may in ((one, True, True), (one, False, False), (several, True, False)):
        found = reasoning_of(form, tokenizer, None, None, True, optional)
        assert (found is not None) == may and reasoning_of(form, tokenizer, False, None, True, optional) is None
        assert reasoning_of(form, tokenizer, None, None, False, optional) is None
        assert found is None or (found.begin == (tokenizer.token_id(mark),) and found.budget is None)
