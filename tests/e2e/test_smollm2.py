"""The default model: a server that is started without a word about models, and sensible English."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pydantic
import pytest

from .serving import Server, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def default(default_model: Path) -> Iterator[Server]:
    with running("--pool-tokens", "8192") as server:
        yield server


@pytest.fixture
def client(default: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=default.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


# One of few questions whose answer rounding cannot change: asked for the capital of France first, the model is 0.25
# nats from "L'Étoile, la Marseillaise", and llama.cpp answers that from the same file.
def test_capitals(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    first = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
    text = first.choices[0].message.content
    assert text is not None and "Tokyo" in text
    assert first.choices[0].finish_reason == "stop"
    pieces = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And of France?"}]
    second = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
    assert "Paris" in (second.choices[0].message.content or "")
    assert first.usage is not None and second.usage is not None
    details = second.usage.prompt_tokens_details
    assert details is not None and details.cached_tokens is not None
    # The whole first turn, its answer included, is known.
    assert details.cached_tokens >= first.usage.total_tokens - 2


class GetWeather(pydantic.BaseModel):
    city: str


def test_a_forced_call(client: openai.OpenAI) -> None:
    pytest.importorskip("bough.grammar.llguidance")
    answer = client.chat.completions.parse(
        model="default",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[openai.pydantic_function_tool(GetWeather, name="get_weather", description="The weather in a city.")],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_many_ask_at_once(default: Server, client: openai.OpenAI) -> None:
    text = "One, two, three, four, five, six, seven,"
    alone = client.completions.create(model="default", prompt=text, temperature=0, max_tokens=12)
    together = client.completions.create(model="default", prompt=[text] * 12, temperature=0, max_tokens=12)
    assert "eight" in alone.choices[0].text
    assert [c.text for c in together.choices] == [alone.choices[0].text] * 12
    default.quiet()
