"""/v1/responses as the openai client sees it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bough.base.constraint import Constraint
from bough.base.errors import NotFound
from bough.base.limits import Limits
from bough.base.messages import Finish
from bough.server.responses.store import ResponseStore
from bough.server.responses.translate import messages

from . import scripted
from .scripted import EOS, MODEL, Running, expected_text, make_tokenizer, running_server, wait_for

PROMPT = f"<|user|>hello{EOS}<|assistant|>"


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special=False)


def test_create(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=5, metadata={"a": "b"}, prompt_cache_key="k"
    )
    assert answer.output_text == expected_text(ids(PROMPT), 5)
    assert answer.id.startswith("resp_") and answer.object == "response" and answer.model == MODEL
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.metadata, answer.prompt_cache_key, answer.error) == ({"a": "b"}, "k", None)
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(ids(PROMPT)), 5)
    details = answer.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == len(ids(PROMPT))
    whole = client.responses.create(model=MODEL, input="hello", store=False)
    assert whole.status == "completed" and whole.output_text == expected_text(ids(PROMPT), 24)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(whole.id)


def test_input_in_all_its_forms(server: Running, client: openai.OpenAI) -> None:
    client.responses.create(
        model=MODEL,
        instructions="be",
        max_output_tokens=1,
        input=[
            {"role": "developer", "content": "kind"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
        ],
    )
    prompt = f"<|system|>be{EOS}<|system|>kind{EOS}<|user|>hello{EOS}<|assistant|>hi{EOS}<|tool|>42{EOS}<|assistant|>"
    assert server.client.seen[-1].prompt.tolist() == ids(prompt)


def test_events(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="hello", stream=True, top_logprobs=1))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == expected_text(ids(PROMPT), 24)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert all(delta.logprobs for delta in deltas)
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text
    assert last.response.usage is not None and last.response.usage.output_tokens == 25


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hello") as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response()
    assert answer.output_text == texts[-1] == expected_text(ids(PROMPT), 24)
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


def test_a_failure_in_the_stream_is_an_event(server: Running, http: httpx.Client) -> None:
    server.client.fault_next = Finish("error", message="broken", status=500)
    with http.stream("POST", "/v1/responses", json={"input": "fault", "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert lines[0] == "event: response.created" and lines[-1] == "event: response.failed"


def test_conversation(server: Running, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello", max_output_tokens=4, instructions="be")
    second = client.responses.create(model=MODEL, input="more", previous_response_id=first.id, max_output_tokens=2)
    prompt = f"<|user|>hello{EOS}<|assistant|>{first.output_text}{EOS}<|user|>more{EOS}<|assistant|>"
    assert server.client.seen[-1].prompt.tolist() == ids(prompt)
    assert second.previous_response_id == first.id
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [(item.type, item.role) for item in items] == [("message", r) for r in ("user", "assistant", "user")]
    assert items[1].id == first.output[0].id
    latest = client.responses.input_items.list(second.id, limit=1)
    assert latest.data[0].id == items[2].id and latest.has_more
    assert [item.id for item in latest] == [items[2].id, items[1].id, items[0].id]
    again = client.responses.create(
        model=MODEL, previous_response_id=first.id, max_output_tokens=1,
        input=[{"type": "item_reference", "id": first.output[0].id}],
    )  # fmt: skip
    assert again.status == "incomplete"
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model=MODEL, input="more", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


def test_background() -> None:
    with running_server(step_seconds=0.02) as slow:
        with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
            begun = client.responses.create(model=MODEL, input="hello", background=True)
            assert begun.status == "queued" and begun.background
            events = list(client.responses.retrieve(begun.id, stream=True))
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert events[0].type == "response.created" and events[-1].type == "response.completed"
            late = list(client.responses.retrieve(begun.id, stream=True, starting_after=3))
            assert [event.sequence_number for event in late] == list(range(4, len(events)))
            done = client.responses.retrieve(begun.id)
            assert done.status == "completed" and done.output_text == expected_text(ids(PROMPT), 24)
            # The client that follows may go, the work goes on.
            with client.responses.create(model=MODEL, input="again", background=True, stream=True) as stream:
                followed = next(iter(stream)).response.id
            wait_for(lambda: client.responses.retrieve(followed).status == "completed")
            # What is cancelled keeps what it had, and leaves the engine.
            endless = client.responses.create(
                model=MODEL, input="endless", background=True, extra_body={"ignore_eos": True}
            )
            wait_for(lambda: len(slow.client.running) == 1)
            wait_for(lambda: bool(client.responses.retrieve(endless.id).output))
            assert client.responses.cancel(endless.id).status == "cancelled"
            wait_for(lambda: not slow.client.running)
            assert client.responses.cancel(endless.id).status == "cancelled"
            bad = client.responses.create(model=MODEL, input="x" * 5000, background=True)
            wait_for(lambda: client.responses.retrieve(bad.id).status == "failed")
            failed = client.responses.retrieve(bad.id)
            assert failed.error is not None and failed.error.code == "invalid_prompt"
            deleted = client.responses.create(model=MODEL, input="endless", background=True)
            client.responses.delete(deleted.id)
            wait_for(lambda: not slow.client.running)


def test_asynchronously(server: Running) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            answers = await asyncio.gather(*(client.responses.create(model=MODEL, input=f"{i}") for i in range(8)))
            assert len({answer.id for answer in answers}) == 8
            async with client.responses.stream(model=MODEL, input="hello") as stream:
                assert (await stream.get_final_response()).output_text == expected_text(ids(PROMPT), 24)

    asyncio.run(main())


def test_truncation_drops_the_beginning(server: Running, client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"{i:03} " + "x" * 96} for i in range(100)]
    turns[70:70] = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "y" * 500},
    ]
    with pytest.raises(openai.BadRequestError, match="context"):
        client.responses.create(model=MODEL, input=turns, instructions="be", max_output_tokens=5)
    answer = client.responses.create(
        model=MODEL, input=turns, instructions="be", max_output_tokens=5, truncation="auto"
    )
    assert answer.truncation == "auto" and len(client.responses.input_items.list(answer.id, limit=100).data) == 100
    prompt = make_tokenizer().decode(server.client.seen[-1].prompt.tolist(), skip_special=False)
    kept = 4096 - 5 - len("<|system|>be<|end|><|assistant|>")
    assert prompt.startswith(f"<|system|>be{EOS}<|user|>0") and prompt.endswith(f"x{EOS}<|assistant|>")
    first = int(prompt.partition("<|user|>")[2][:3])
    assert "099 " in prompt and 55 < first < 80 and kept - 220 < len(server.client.seen[-1].prompt) <= 4091
    # An output whose call was dropped is dropped with it.
    assert ("y" in prompt) == (first < 70)
    short = client.responses.create(model=MODEL, input="hello", max_output_tokens=5, truncation="auto")
    assert short.output_text == expected_text(ids(PROMPT), 5)


@pytest.mark.parametrize("n", [3, 4, 9])
def test_truncation_keeps_turns_whole(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    strict = (
        "{% if (loop.index0 % 2 == 0) != (m.role == 'user') %}{{ raise_exception('roles must alternate') }}{% endif %}"
    )
    in_turn = scripted.TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}" + strict)
    monkeypatch.setattr(scripted, "TEMPLATE", in_turn)
    turns = [{"role": ("user", "assistant")[i % 2], "content": f"{i:03} " + "x" * 800} for i in range(2 * n + 1)]
    with running_server() as strict_server, httpx.Client(base_url=strict_server.url) as http:
        http.post(
            "/v1/responses", json={"input": turns, "truncation": "auto", "max_output_tokens": 5}
        ).raise_for_status()
        prompt = make_tokenizer().decode(strict_server.client.seen[-1].prompt.tolist(), skip_special=False)
    # As many of the last as fit, from a user's on.
    assert prompt.count("<|user|>") == 3 and prompt.count("<|assistant|>") == 3 and f"{2 * n:03} " in prompt


def test_background_responses_of_one_tenant_leave_room_for_others(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.a]\nkey = "alice"\n[keys.b]\nkey = "bob"\n')
    with running_server(api_key_file=str(keys), limits=Limits(responses_background=2)) as server:
        ask = {"input": "hello", "background": True}
        with httpx.Client(base_url=server.url) as http:
            server.client.frozen = True
            codes = [
                http.post("/v1/responses", json=ask, headers={"authorization": f"Bearer {key}"}).status_code
                for key in ("alice", "alice", "alice", "bob")
            ]
            server.client.frozen = False
    assert codes == [200, 200, 429, 200]
    assert {request.priority for request in server.client.seen} == {-Limits().priority_abs}


def test_logprobs_are_kept_as_they_are_sent(client: openai.OpenAI) -> None:
    more: Any = {"model": MODEL, "input": "hello", "max_output_tokens": 4, "include": ["message.output_text.logprobs"]}
    made: Any = client.responses.create(**more, top_logprobs=3)
    kept: Any = client.responses.retrieve(made.id)
    assert kept.output == made.output and len(kept.output[0].content[0].logprobs) == 4
    after = client.responses.create(model=MODEL, input="go on", previous_response_id=made.id, max_output_tokens=1)
    assert after.usage is not None and after.usage.input_tokens > made.usage.total_tokens


def test_reasoning_stays_in_its_turn() -> None:
    said: Any = [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "cut"}]},
        {"type": "message", "role": "user", "content": "b"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": "c"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": " two"}]},
        {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"},
    ]
    found = [(m["role"], m["content"], m.get("reasoning_content")) for m in messages(None, said)]
    assert found == [
        ("user", "a", None), ("assistant", None, "cut"), ("user", "b", None), ("assistant", "c", "one two"),
    ]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), [
    ({"input": []}, "input"), ({"input": [{"type": "computer_call"}]}, "input"), ({}, None),
    ({"input": "a", "previous_response_id": "resp_x"}, "previous_response_id"),
    ({"input": "a", "conversation": "c"}, "conversation"), ({"input": "a", "prompt": {"id": "p"}}, "prompt"),
    ({"input": "a", "background": True, "store": False}, "background"),
    ({"input": "a", "include": ["x"]}, "include"), ({"input": "x" * 5000, "truncation": "auto"}, "input"),
    ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"), ({"input": "a", "temperature": 9}, "temperature"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"input": [{"role": "king", "content": "a"}]}, "input"), ({"input": "x" * 5000}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": "a", "metadata": {"k" * 65: "v"}}, "metadata"),
    ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input"),
])  # fmt: skip
def test_refusals_name_the_field(http: httpx.Client, body: Any, param: str | None) -> None:
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(("body", "words"), [
    ({"input": [{"role": "king", "content": "a"}]}, "input.role must be one of"),
    ({"input": [{"role": "user"}]}, "input.content is missing"),
    ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens is too large: 5000. This model's maximum context"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens must be at least 1"),
    ({"input": "a", "text": {"format": {"type": "x"}}}, "text.format.type must be"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format"),
    ({"input": "a", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name must have"),
])  # fmt: skip
def test_errors_speak_of_this_api(http: httpx.Client, body: Any, words: str) -> None:
    assert http.post("/v1/responses", json=body).json()["error"]["message"].startswith(words)


def test_stored_things_that_are_not_there(client: openai.OpenAI) -> None:
    kept = client.responses.create(model=MODEL, input="a", max_output_tokens=1)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(kept.id)
    with pytest.raises(openai.BadRequestError):
        list(client.responses.retrieve(kept.id, stream=True))
    for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="Response with id 'resp_none' not found."):
            call("resp_none")


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = ResponseStore(Limits(responses_bytes=1000, responses_seconds=60.0), clock=lambda: now[0])

    def add(name: str, status: str = "completed") -> None:
        store.add({"id": name, "status": status, "output": [], "text": "x" * 300}, "", [], [])

    for name in "abc":
        add(name)
    assert len(store) == 2 and store.get("c", "").response["id"] == "c"
    now[0] = 61.0
    add("d")
    assert len(store) == 1
    add("e", "in_progress")
    now[0] = 200.0
    add("f")
    assert len(store) == 2  # what runs stays


@pytest.mark.parametrize(("fields", "constraint"), [
    ({"structured_outputs": {"regex": "a+"}}, Constraint(kind="regex", text="a+")),
    ({"regex": "a+"}, Constraint(kind="regex", text="a+")),
    ({"guided_choice": ["a", "b"]}, Constraint(kind="choice", text='["a","b"]')),
])  # fmt: skip
def test_constraints_are_those_of_chat(server: Running, http: httpx.Client, fields: Any, constraint: Any) -> None:
    assert http.post("/v1/responses", json={"input": "hello", "store": False, **fields}).status_code == 200
    assert server.client.seen[-1].constraint == constraint


def test_sampling_is_that_of_chat(server: Running, http: httpx.Client) -> None:
    fields = {
        "logit_bias": {"5": 1.0}, "min_tokens": 2, "stop_token_ids": [7], "stop_regex": "z+", "allowed_token_ids": [8],
        "thinking_token_budget": 5,
    }  # fmt: skip
    assert http.post("/v1/responses", json={"input": "hello", "store": False, **fields}).status_code == 200
    params, reasoning = server.client.seen[-1].params, server.client.seen[-1].reasoning
    assert reasoning is not None and reasoning.budget == 5
    assert (params.logit_bias, params.min_tokens, params.stop_token_ids) == ({5: 1.0}, 2, (7,))
    assert (params.stop_regex, params.allowed_token_ids) == (("z+",), (8,))


@pytest.mark.parametrize(("name", "value"), [
    ("response_format", {"type": "json_object"}), ("lora_id", "x"), ("custom_logit_processor", "x"),
    ("regex", ""), ("logits_processors", ["x"]), ("lora_path", "x"),
])  # fmt: skip
def test_what_chat_refuses_is_refused(http: httpx.Client, name: str, value: Any) -> None:
    answer = http.post("/v1/responses", json={"input": "hello", name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text


@pytest.mark.parametrize("way", ["whole", "stream", "background"])
def test_warnings(server: Running, http: httpx.Client, way: str) -> None:
    form = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    body = {"input": "hello", "text": {"format": form}, "stream": way != "whole", "background": way == "background"}
    server.client.fault_next = Finish("stop", warnings=("uniqueItems is not enforced",))
    answer = http.post("/v1/responses", json=body)
    last = answer.json() if way == "whole" else json.loads(answer.text.rpartition("data: ")[2])["response"]
    assert last["status"] == "completed" and last["warnings"] == ["uniqueItems is not enforced"]


@pytest.mark.parametrize(("fields", "kind", "param"), [
    ({"text": {"format": {"type": "json_object"}}}, "json_object", "text.format"), ({"regex": "a"}, "regex", "regex"),
    ({"tools": [{"type": "function", "name": "f"}], "tool_choice": "required"}, "grammar", "tools[0].parameters"),
])  # fmt: skip
def test_what_the_engine_refuses_names_the_field(
    server: Running, http: httpx.Client, fields: Any, kind: str, param: str
) -> None:
    server.client.fault_next = Finish("error", message="it is odd", status=400, param=kind)
    answer = http.post("/v1/responses", json={"input": "hello", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_top_logprobs_names_itself(http: httpx.Client) -> None:
    for path, body in (
        ("responses", {"input": "a"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    ):
        answer = http.post(f"/v1/{path}", json={**body, "top_logprobs": 21})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("item", [
    {"type": "item_reference", "id": []}, {"type": "item_reference", "id": {}}, {"type": "item_reference"},
    {"role": "user", "content": "x", "id": {}}, {"type": "function_call_output", "call_id": {}, "output": "x"},
    {"type": "function_call", "call_id": [], "name": "f", "arguments": "{}"},
    {"type": "reasoning", "summary": 5, "content": 5}, {"type": "reasoning", "content": True},
    {"type": "reasoning", "summary": [], "content": -1}, {"type": [], "role": "user", "content": "x"},
])  # fmt: skip
@pytest.mark.parametrize("truncation", ["auto", "disabled"])
def test_what_is_no_item_is_refused(http: httpx.Client, item: Any, truncation: str) -> None:
    body = {"input": [item, {"role": "user", "content": "x"}], "truncation": truncation, "max_output_tokens": 1}
    answer = http.post("/v1/responses", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input", answer.text


def test_what_is_null_in_an_item_is_not_there(server: Running, http: httpx.Client) -> None:
    items = [
        {"type": "reasoning", "id": None, "summary": [], "content": None, "encrypted_content": None, "status": None},
        {"type": None, "id": None, "role": "user", "content": "hello", "phase": None},
    ]
    made = http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).json()
    assert server.client.seen[-1].prompt.tolist() == ids(PROMPT)
    kept = http.get(f"/v1/responses/{made['id']}/input_items").json()["data"]
    assert all(isinstance(item["id"], str) for item in kept) and len(kept) == 2


def test_a_reference_needs_no_type(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello", max_output_tokens=4)
    reference: Any = {"id": first.output[0].id}
    client.responses.create(model=MODEL, previous_response_id=first.id, input=[reference], max_output_tokens=1)


def test_a_tenant_does_not_empty_what_is_kept_for_others() -> None:
    store = ResponseStore(Limits(responses_bytes=3000))
    store.add({"id": "bob", "status": "completed", "output": [], "text": "x" * 300}, "bob", [], [])
    for i in range(50):
        store.add({"id": f"{i}", "status": "completed", "output": [], "text": "x" * 700}, "alice", [], [])
    assert store.get("bob", "bob") and store.get("49", "alice") and store.get("48", "alice")
    with pytest.raises(NotFound):
        store.get("40", "alice")
