"""litellm against the real server, as an OpenAI server and as a vLLM one."""

from __future__ import annotations

import asyncio
import os
import warnings
from typing import Any

import pytest

from .serving import Server

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network for prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    litellm = pytest.importorskip("litellm")

pytestmark = [pytest.mark.filterwarnings("ignore")]
MESSAGES = [{"role": "user", "content": "the cat"}]


def arguments(server: Server, provider: str) -> dict[str, Any]:
    return {
        "model": f"{provider}/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "temperature": 0,
        "max_tokens": 12, "max_retries": 0,
    }  # fmt: skip


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chat_and_its_stream(served: Server, provider: str) -> None:
    whole = litellm.completion(messages=MESSAGES, **arguments(served, provider))
    assert whole.choices[0].finish_reason in ("length", "stop") and whole.usage.completion_tokens <= 12
    chunks = list(litellm.completion(messages=MESSAGES, stream=True, **arguments(served, provider)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text


def test_text_completion_and_responses(served: Server) -> None:
    answer = litellm.text_completion(prompt="the cat", **arguments(served, "text-completion-openai"))
    assert answer.choices[0].text
    made = {k: v for k, v in arguments(served, "openai").items() if k not in ("max_tokens", "max_retries")}
    response = litellm.responses(input="the cat", max_output_tokens=16, **made)
    assert response.status in ("incomplete", "completed") and response.usage.output_tokens <= 16


def test_errors_and_the_asynchronous_side(served: Server) -> None:
    async def main() -> None:
        answers = await asyncio.gather(
            *(litellm.acompletion(messages=MESSAGES, **arguments(served, "openai")) for _ in range(4))
        )
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        await litellm.close_litellm_async_clients()

    asyncio.run(main())
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=MESSAGES, **{**arguments(served, "openai"), "model": "openai/other"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": "cat " * 40000}], **arguments(served, "openai"))
