"""/v1/completions as the openai client and lm-eval see it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from .scripted import MODEL, expected_text, make_tokenizer, script


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special=True)


@pytest.mark.parametrize(("prompt", "texts"), [
    ("hello", ["hello"]), (["hello", "you"], ["hello", "you"]), (ids("hello"), ["hello"]),
    ([ids("hello"), ids("you")], ["hello", "you"]),
])  # fmt: skip
def test_prompt_forms_and_prompt_major_order(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, seed=5, max_tokens=6)
    expected = [expected_text(ids(text), 6, seed=5 + j) for text in texts for j in range(2)]
    assert [c.index for c in answer.choices] == list(range(len(expected)))
    assert [c.text for c in answer.choices] == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(ids(text)) for text in texts)
    assert answer.usage.completion_tokens == 6 * len(expected)
    chunks = list(client.completions.create(model=MODEL, prompt=prompt, n=2, seed=5, max_tokens=6, stream=True))
    streamed = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == i) for i in range(len(expected))]
    assert streamed == expected
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
    assert reasons == ["length"] * len(expected)


def test_default_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello")
    assert answer.choices[0].text == expected_text(ids("hello"), 16) and answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood_as_lm_eval_asks_for_it(http: httpx.Client, max_tokens: int) -> None:
    prompt = ids("The quick brown fox")
    body = {"model": MODEL, "prompt": [prompt], "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234,
            "echo": True}  # fmt: skip
    answer = http.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    n = len(prompt) + max_tokens
    assert [len(logprobs[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [n] * 4
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert choice["text"].startswith("The quick brown fox")
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, top in list(
        zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    )[1:]:
        assert max(top, key=lambda key: top[key]) == token and top[token] == value
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert logprobs["text_offset"] == list(range(n))


@pytest.mark.parametrize("stream", [False, True])
def test_echo(client: openai.OpenAI, stream: bool) -> None:
    made = client.completions.create(model=MODEL, prompt="hello", echo=True, max_tokens=3, logprobs=0, stream=stream)
    choices = [c.choices[0] for c in made] if not isinstance(made, openai.types.Completion) else made.choices
    assert "".join(c.text for c in choices) == "hello" + expected_text(ids("hello"), 3)
    offsets = [o for c in choices if c.logprobs is not None for o in c.logprobs.text_offset or []]
    assert offsets == list(range(8))


def test_logprobs_of_generated_tokens(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{script(ids('hello'), None, i)}" for i in range(3)]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_token_ids_and_prompt_logprobs(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 2, "return_token_ids": True, "prompt_logprobs": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids("hello")
    assert choice["token_ids"] == [script(ids("hello"), None, i) for i in range(2)]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == 5


def test_prefill_only(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 0}).json()
    assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "length"


def test_usage_chunk(http: httpx.Client) -> None:
    body = {"prompt": ["a", "bb"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    events = http.post("/v1/completions", json=body).text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert '"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7' in events[-2]
    assert all('"usage":null' in event for event in events[:-2])


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"), ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "a", "best_of": 10**6}, "best_of"), ({"prompt": "a", "best_of": 0}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [99999]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
    ({}, None), ({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": ["a"] * 1000, "n": 2}, "n"),
    ({"prompt": "a", "guided_json": "{"}, "guided_json"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"), ({"prompt": "a", "bad_words": [""]}, "bad_words"),
    ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
])  # fmt: skip
def test_refusals_name_the_field(http: httpx.Client, body: Any, param: str | None) -> None:
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of(http: httpx.Client, logprobs: int | None) -> None:
    fields = {"prompt": ["hello", "you"], "max_tokens": 5, "seed": 3, "logprobs": 1}
    every = http.post("/v1/completions", json={**fields, "n": 6}).json()
    ranked = []
    for prompt in (every["choices"][:6], every["choices"][6:]):
        means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / 5 for c in prompt}
        ranked += sorted(means, key=lambda text: -means[text])[:2]
    answer = http.post("/v1/completions", json={**fields, "n": 2, "best_of": 6, "logprobs": logprobs}).json()
    assert [choice["text"] for choice in answer["choices"]] == ranked
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] is None for choice in answer["choices"]] == [logprobs is None] * 4
    assert (
        answer["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    )  # what was generated to be compared is counted
    same = http.post("/v1/completions", json={"prompt": "a", "best_of": 2, "n": 2, "max_tokens": 1, "stream": True})
    assert same.status_code == 200
