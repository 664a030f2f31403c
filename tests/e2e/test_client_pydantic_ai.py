"""pydantic-ai against the real server, over chat completions and over responses."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from .serving import Server

pydantic_ai = pytest.importorskip("pydantic_ai")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def agent(client: openai.AsyncOpenAI, kind: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(openai_client=client)
    made = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[kind]("tiny", provider=provider)
    settings = {"temperature": 0.0, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    return pydantic_ai.Agent(made, instructions="the dog", model_settings=settings)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_runs_streams_and_conversations(served: Server, kind: str) -> None:
    async def talk(client: openai.AsyncOpenAI) -> None:
        one = agent(client, kind)
        first = await one.run("the cat")
        assert first.output
        assert first.usage.output_tokens == 60
        async with one.run_stream("the cat") as streamed:
            texts = [text async for text in streamed.stream_text(debounce_by=None)]
        assert texts[-1] == first.output
        second = await one.run("again", message_history=first.all_messages())
        assert len(second.all_messages()) == 4

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            await talk(client)

    asyncio.run(main())
