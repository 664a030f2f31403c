"""langchain-openai against the real server, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from .serving import Server

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    langchain_openai = pytest.importorskip("langchain_openai")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PROMPT = [("system", "the dog"), ("user", "the cat")]


@contextmanager
def model(server: Server, **more: Any) -> Iterator[Any]:
    """A model with connections of its own; langchain would keep those that it makes itself for good."""
    with openai.DefaultHttpxClient() as http:
        yield langchain_openai.ChatOpenAI(
            model="tiny", base_url=f"{server.url}/v1", api_key="none", max_retries=0, temperature=0, max_tokens=12,
            stream_usage=True, http_client=http, **more,
        )  # fmt: skip


@pytest.mark.parametrize("responses", [False, True])
def test_invoke_and_stream(served: Server, responses: bool) -> None:
    with model(served, use_responses_api=responses) as chat:
        whole = chat.invoke(PROMPT)
        chunks = list(chat.stream(PROMPT))
    assert whole.usage_metadata["output_tokens"] == 12 and whole.usage_metadata["input_tokens"] > 4
    assert whole.text
    assert "".join(chunk.text for chunk in chunks) == whole.text
    total = chunks[0]
    for chunk in chunks[1:]:
        total = total + chunk
    assert total.usage_metadata["output_tokens"] == 12


def test_asynchronously(served: Server) -> None:
    async def main() -> None:
        async with openai.DefaultAsyncHttpxClient() as http:
            with model(served, http_async_client=http) as chat:
                await ask(chat)

    async def ask(chat: Any) -> None:
        alone = [(await chat.ainvoke([("user", f"number {i}")])).text for i in range(4)]
        together = await chat.abatch([[("user", f"number {i}")] for i in range(4)])
        assert [answer.text for answer in together] == alone
        streamed = [chunk.text async for chunk in chat.astream([("user", "number 0")])]
        assert "".join(streamed) == alone[0]

    asyncio.run(main())


def test_errors_and_logprobs(served: Server) -> None:
    with model(served, logprobs=True, top_logprobs=2) as chat:
        assert len(chat.invoke(PROMPT).response_metadata["logprobs"]["content"]) == 12
        with pytest.raises(openai.NotFoundError):
            chat.bind(model="other").invoke(PROMPT)
