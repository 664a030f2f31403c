"""Structured outputs through HTTP, with the official client and each dialect's own fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from .serving import Server


class Trip(BaseModel):
    city: Literal["London", "Paris"]
    nights: Literal[1, 2, 3]
    breakfast: bool


SCHEMA = Trip.model_json_schema() | {"additionalProperties": False}


@pytest.fixture
def client(served: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


MESSAGES: list[Any] = [{"role": "user", "content": "the cat"}]


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Trip, max_tokens=200, n=2, logprobs=True, seed=3
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Trip) and choice.finish_reason == "stop"
        content = choice.logprobs.content if choice.logprobs is not None else None
        text = choice.message.content or ""
        # The last token is the end of the sequence, which is not shown.
        assert content is not None and "".join(p.token for p in content[:-1]) == text


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Trip, max_tokens=200, temperature=0
    ) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    whole = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Trip, max_tokens=200, temperature=0
    )
    assert streamed == whole.choices[0].message.parsed != None  # noqa: E711


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}}, r"\{.*"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"city": .*\}'),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, r'\{"city":".*\}'),
        ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"guided_json": json.dumps(SCHEMA)}, r'\{"city": .*\}'),
        ({"guided_regex": "[cd]{3}"}, "[cd]{3}"),
        ({"guided_choice": ["maybe"]}, "maybe"),
        ({"guided_grammar": 'start: "q" /[0-9]/'}, "q[0-9]"),
        ({"regex": "[ef]{3}"}, "[ef]{3}"),
        ({"ebnf": 'root ::= "z" [0-9]'}, "z[0-9]"),
        (
            {"response_format": {"type": "structural_tag", "format": {
                "type": "triggered_tags", "triggers": ["<f"], "at_least_one": True, "stop_after_first": True,
                "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"enum": [7]}},
                          "end": "</f>"}],
            }}},
            "<f>7</f>",
        ),
        (
            {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": {
                "type": "sequence", "elements": [
                    {"type": "const_string", "value": "so: "},
                    {"type": "or", "elements": [{"type": "regex", "pattern": "[ab]{3}"},
                                                {"type": "json_schema", "json_schema": {"enum": [7, 8]}}]},
                    {"type": "json_schema", "style": "qwen_xml", "json_schema": {
                        "type": "object", "properties": {"n": {"type": "string", "enum": ["x", "y"]}},
                        "required": ["n"]}},
                ]}})}},
            "so: ([ab]{3}|7|8)<parameter=n>\n[xy]\n</parameter>\n",
        ),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_every_dialect(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    import re

    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=100, extra_body={**fields, "ignore_eos": True}
    )
    assert re.fullmatch(pattern, answer.choices[0].message.content or "", re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, r'\{"city": .*\}'),
        ({"json_schema": "$$ANY$$"}, r"\{.*"),
        ({"regex": "[ab]{2}"}, "[ab]{2}"),
        ({"ebnf": 'root ::= "z" [0-9]'}, "z[0-9]"),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) else "",
)
def test_the_native_route(served: Server, fields: dict[str, Any], pattern: str) -> None:
    import re

    body = {"text": "the cat", "sampling_params": {"max_new_tokens": 100, **fields}}
    answer = httpx.post(served.url + "/generate", json=body, timeout=60).json()
    assert re.fullmatch(pattern, answer["text"], re.DOTALL)


STRICT = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "not": {"required": ["b"]}}


def test_what_is_not_enforced_is_refused_or_named(client: openai.OpenAI) -> None:
    def ask(strict: bool, **more: Any) -> Any:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "a", "strict": strict, "schema": STRICT}}
        return client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=wanted, max_tokens=60, **more
        )

    with pytest.raises(openai.BadRequestError, match="not"):
        ask(strict=True)
    assert any("not" in warning for warning in ask(strict=False).model_extra["warnings"])
    last = list(ask(strict=False, stream=True))[-1]
    assert any("not" in warning for warning in last.model_extra["warnings"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "nonsense"}},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"structured_outputs": {"structural_tag": "[]"}},
        {"regex": "a", "ebnf": 'root ::= "b"'},
        {"guided_json": {"type": "array", "uniqueItems": True}},
    ],
    ids=json.dumps,
)
def test_bad_constraints_are_400(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=10, extra_body=fields)
    assert caught.value.status_code == 400
