"""``vllm bench serve`` against us: the program itself where it is installed, and everywhere what it sends and reads.

The second test speaks as ``vllm/benchmarks/serve.py`` and ``lib/endpoint_request_func.py`` of vLLM 0.32 do: one session
that keeps its connections, the model's name from ``/v1/models``, bodies with ``repetition_penalty``, ``logprobs: null``
and ``ignore_eos``, an ``x-request-id`` for each, all at once under a bound on what is in flight; events are cut out of
whatever bytes arrive, and lengths are taken from the last event's usage.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from .serving import Server

REQUESTS, IN_FLIGHT = 64, 16


@pytest.mark.slow
@pytest.mark.parametrize("backend, path", [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
def test_the_program(served: Server, long_model: Path, tmp_path: Path, backend: str, path: str) -> None:
    if (program := shutil.which("vllm")) is None:
        pytest.skip("vllm is not installed")
    done = subprocess.run(
        [program, "bench", "serve", "--backend", backend, "--base-url", served.url, "--endpoint", path,
         "--tokenizer", str(long_model), "--dataset-name", "random", "--random-input-len", "48",
         "--random-output-len", "24", "--num-prompts", str(REQUESTS), "--max-concurrency", str(IN_FLIGHT),
         "--ignore-eos", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * 24
    served.quiet()


class Events:
    """Whole events, from bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[str]:
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        return [event.decode().strip().removeprefix("data: ") for event in whole if not event.startswith(b":")]


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], rid: str) -> tuple[int, int, int]:
    """(prompt tokens, generated tokens, events with a choice) of one request, as the server tells them."""
    events, usage, seen, last = Events(), None, 0, ""
    async with session.post(url, json=body, headers={"x-request-id": rid}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["x-request-id"] == rid
        async for data in response.content.iter_any():
            for last in events.take(data):
                if last == "[DONE]":
                    continue
                event = json.loads(last)
                if event.get("choices"):
                    seen += 1
                    choice = event["choices"][0]
                    assert "text" in choice or "content" in choice["delta"] or choice["finish_reason"]
                elif event.get("usage"):
                    usage = event["usage"]
    assert last == "[DONE]" and usage is not None
    return usage["prompt_tokens"], usage["completion_tokens"], seen


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_its_load(served: Server, path: str) -> None:
    rng = random.Random(path)
    common = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}

    def body(model: str, n: int) -> dict[str, Any]:
        text = " ".join(rng.choices(["the", "cat", "a", "dog", "sat", "on", "mat", "ran"], k=rng.randint(8, 300)))
        if path.endswith("chat/completions"):
            messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            return {"model": model, "messages": messages, "max_completion_tokens": n, **common}
        return {"model": model, "prompt": text, "repetition_penalty": 1.0, "max_tokens": n, "logprobs": None, **common}

    async def main() -> list[tuple[int, tuple[int, int, int]]]:
        room = asyncio.Semaphore(IN_FLIGHT)
        connector = aiohttp.TCPConnector(limit=IN_FLIGHT, limit_per_host=IN_FLIGHT, keepalive_timeout=60)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:
            async with session.get(f"{served.url}/v1/models") as response:
                first = (await response.json())["data"][0]
                model, _ = first["id"], first["root"]

            async def one(i: int, n: int) -> tuple[int, tuple[int, int, int]]:
                async with room:
                    return n, await ask(session, served.url + path, body(model, n), f"bench-{i}")

            return await asyncio.gather(*(one(i, rng.randint(2, 48)) for i in range(REQUESTS)))

    answers = asyncio.run(main())
    assert all(generated == asked and prompt > 0 for asked, (prompt, generated, _) in answers)
    assert all(events >= 1 for _, (_, _, events) in answers)
    served.quiet()
