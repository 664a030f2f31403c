"""A streaming client of any OpenAI-compatible server, that writes down when each chunk came."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from bough.base.errors import ConfigError
from bough.bench.measures import Call

if TYPE_CHECKING:
    import aiohttp


class Client:
    """One server and one model of it. Use as an asynchronous context manager.

    Attributes:
        extra: fields added to every request.
        ignore_eos: send ``ignore_eos`` (bough, vLLM, SGLang and llama.cpp know it), so that every answer has the
            length that was asked for.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str,
        *,
        ignore_eos: bool = True,
        extra: dict[str, Any] | None = None,
        timeout: float = 900.0,
    ) -> None:
        self._base = base_url.rstrip("/")
        self._model = model
        self._key = api_key
        self._timeout = timeout
        self.ignore_eos = ignore_eos
        self.extra = extra or {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        import aiohttp

        # No pool limit: the workload's concurrency is the only one. No reuse of connections: some servers close
        # idle ones without a word, and a new one costs about 0.1 ms on the same machine.
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self._timeout),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {self._key}"},
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def models(self) -> list[str]:
        """Names of the models that the server offers; ConfigError if it cannot be asked."""
        assert self._session is not None, "the client is used inside `async with`"
        try:
            async with self._session.get(f"{self._base}/models") as response:
                response.raise_for_status()
                return [m["id"] for m in (await response.json())["data"]]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{self._base} does not answer as an OpenAI-compatible server: {error}") from None

    async def complete(self, prompt: str, tokens: int, **fields: Any) -> Call:
        """One request to ``/completions`` for at most ``tokens`` tokens per choice; never raises, see Call.error."""
        return await self._send("/completions", {"prompt": prompt}, tokens, fields)

    async def chat(self, messages: list[dict[str, str]], tokens: int, **fields: Any) -> Call:
        """The same to ``/chat/completions``."""
        return await self._send("/chat/completions", {"messages": messages}, tokens, fields)

    def body(self, prompt: dict[str, Any], tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
        """What is sent; a server of another dialect overrides this."""
        body = {
            "model": self._model,
            **prompt,
            "max_tokens": tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            **fields,
            **self.extra,
        }
        if not self.ignore_eos:
            body.pop("ignore_eos", None)
        return body

    async def _send(self, path: str, prompt: dict[str, Any], tokens: int, fields: dict[str, Any]) -> Call:
        import aiohttp

        assert self._session is not None, "the client is used inside `async with`"
        body = self.body(prompt, tokens, fields)
        call = Call(asked=tokens * int(fields.get("n", 1)), start=time.perf_counter())
        try:
            async with self._session.post(self._base + path, json=body) as response:
                if response.status != 200:
                    call.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                else:
                    await _read(response.content, call)
        except (OSError, ValueError, TimeoutError, aiohttp.ClientError) as error:
            call.error = f"{type(error).__name__}: {error}"
        call.end = time.perf_counter()
        # A chunk holds at least one token; some servers count one choice of n only.
        call.n_generated = max(call.n_generated, sum(len(s) for s in call.stamps.values()))
        return call


async def _read(stream: aiohttp.StreamReader, call: Call) -> None:
    """Take in server-sent events up to ``[DONE]``.

    They are decoded when all are there: what the client computes is taken from a server on the same machine.
    """
    events: list[tuple[bytes, float]] = []
    async for line in stream:
        if line.startswith(b"data:"):
            events.append((line, time.perf_counter()))
    for line, now in events:
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        take(call, json.loads(data), now)


def take(call: Call, event: dict[str, Any], now: float) -> None:
    """Add one decoded event, received at ``now``, to the call."""
    if event.get("error"):
        call.error = str(event["error"])[:300]
        return
    for choice in event.get("choices") or []:
        index = choice.get("index", 0)
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        if text:
            call.texts[index] = call.texts.get(index, "") + text
            call.stamps.setdefault(index, []).append(now)
        if choice.get("finish_reason"):
            call.finish[index] = choice["finish_reason"]
    usage = event.get("usage")
    if usage:
        call.n_prompt = usage.get("prompt_tokens") or 0
        call.n_generated = usage.get("completion_tokens") or 0
        call.n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", call.n_cached)
