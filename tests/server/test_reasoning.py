"""Reasoning of chat completions and bare prompts, its budget included, over a model whose answers are scripted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .answers import ASK, CALL, THOUGHT, TOOLS, answering, numbers, sent
from .scripted import MODEL, Running, make_tokenizer, running_server


@pytest.fixture
def client(hermes: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_reasoning_that_the_prompt_began(hermes: Running, http: httpx.Client) -> None:
    # The template of the scripted model puts the tag before the role of the answer, so this one ends with it.
    messages = [*ASK, {"role": "assistant", "content": "<think>\nIt asks"}]
    fields = answering(hermes, f" for weather.\n</think>\n\n{CALL}")
    body = {**fields.pop("extra_body"), **fields, "messages": messages, "tools": TOOLS, "tool_choice": "required",
            "continue_final_message": True, "add_generation_prompt": False}  # fmt: skip
    answer = httpx.post(f"{hermes.url}/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "for weather."
    assert message["tool_calls"][0]["function"]["name"] == "get_weather"
    request = next(r for r in hermes.client.seen if r.rid == body["rid"])
    assert make_tokenizer().decode(request.reasoning.end) == "</think>" and "thinking" not in request.constraint.text


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_thinking_tokens"])
def test_thinking_budget(hermes: Running, client: openai.OpenAI, name: str) -> None:
    fields = answering(hermes, THOUGHT)
    fields["extra_body"][name] = 7
    client.chat.completions.create(**fields)
    request, tokenizer = sent(hermes, fields), make_tokenizer()
    # The prompt leaves open whether the model thinks.
    assert request.reasoning.budget == 7 and tokenizer.decode(request.reasoning.begin) == "<think>"
    assert tokenizer.decode(request.reasoning.end) == "</think>"
    fields = answering(hermes, f"{THOUGHT}{CALL}")
    fields["extra_body"][name] = 7
    client.chat.completions.create(**fields, tools=TOOLS, tool_choice="required")
    request = sent(hermes, fields)
    assert request.reasoning.budget == 7 and request.constraint.kind == "grammar"
    for value in (-1, "many"):
        fields = answering(hermes, CALL)
        fields["extra_body"][name] = value
        with pytest.raises(openai.BadRequestError, match=name):
            client.chat.completions.create(**fields)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_thinking_budget_of_a_bare_prompt(hermes: Running, path: str) -> None:
    decode = make_tokenizer().decode

    def reasoning(prompt: str, **fields: Any) -> Any:
        rid = f"bare-{next(numbers)}"
        sampling = fields.pop("sampling", {})
        body = {"text": prompt, "sampling_params": sampling} if path == "/generate" else {"prompt": prompt, **sampling}
        assert httpx.post(hermes.url + path, json={**body, **fields, "rid": rid}).status_code == 200
        return next(r for r in hermes.client.seen if r.rid == rid).reasoning

    for name in ("thinking_token_budget", "max_thinking_tokens"):
        found = reasoning("so <think>\n", **{name: 7})
        assert (found.budget, found.begin, decode(found.end)) == (7, (), "</think>")
        found = reasoning("so", **{name: 0})
        assert (found.budget, decode(found.begin)) == (0, "<think>")
        assert reasoning("<think>so</think>", **{name: 7}) is None
    constrained = {"regex": "[a-z ]*"}
    assert reasoning("so <think>\n", sampling=constrained) is None
    if path == "/generate":
        found = reasoning("so <think>\n", sampling=constrained, require_reasoning=True)
        assert (found.budget, found.begin, decode(found.end)) == (None, (), "</think>")


def test_thinking_budget_of_a_model_that_does_not_think() -> None:
    with running_server(tool_parser="none", reasoning_parser="none") as running:
        body = {"model": MODEL, "messages": ASK, "thinking_token_budget": 5}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"


def test_reasoning(hermes: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**answering(hermes, f"{THOUGHT}Sunny."))
    message = answer.choices[0].message
    assert message.content == "Sunny." and message.model_extra is not None
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"] == "It asks for weather."
    details = answer.usage.completion_tokens_details if answer.usage else None
    ids = make_tokenizer().encode(THOUGHT.rstrip(), add_special=False)
    assert details is not None and details.reasoning_tokens == len(ids)


def test_stream_of_reasoning(hermes: Running, client: openai.OpenAI) -> None:
    fields = answering(hermes, f"{THOUGHT}Sunny.")
    usage: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=usage))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    thoughts = [d.model_extra["reasoning_content"] for d in deltas if d.model_extra and "reasoning" in d.model_extra]
    assert "".join(thoughts) == "It asks for weather." and len(thoughts) > 5
    assert "".join(d.content or "" for d in deltas) == "Sunny."
    details = chunks[-1].usage.completion_tokens_details if chunks[-1].usage else None
    assert details is not None and details.reasoning_tokens == len(
        make_tokenizer().encode(THOUGHT.rstrip(), add_special=False)
    )


def test_reasoning_options(hermes: Running, client: openai.OpenAI) -> None:
    def deltas(**options: Any) -> list[Any]:
        fields = answering(hermes, f"{THOUGHT}Sunny.")
        fields["extra_body"] |= options
        return [c.choices[0].delta for c in client.chat.completions.create(**fields, stream=True)]

    whole = [d for d in deltas(stream_reasoning=False) if (d.model_extra or {}).get("reasoning")]
    assert [d.model_extra["reasoning"] for d in whole] == ["It asks for weather."]
    together = deltas(separate_reasoning=False)
    assert "".join(d.content or "" for d in together) == f"{THOUGHT}Sunny."
    without = deltas(include_reasoning=False)
    assert "".join(d.content or "" for d in without) == "Sunny." and not any(d.model_extra for d in without)


def test_separate_reasoning(hermes: Running) -> None:
    def separate(**body: Any) -> Any:
        return httpx.post(f"{hermes.url}/separate_reasoning", json=body).json()

    assert separate(text=f"{THOUGHT}Sunny.") == {"reasoning_text": "It asks for weather.", "text": "Sunny."}
    assert separate(text="a</think>b", reasoning_parser="deepseek-r1") == {"reasoning_text": "a", "text": "b"}
    assert separate(text="x", reasoning_parser="unheard")["error"]["param"] == "reasoning_parser"
