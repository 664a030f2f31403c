"""A streaming client of any OpenAI-compatible server, that writes down when each chunk came."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from bough.base.errors import ConfigError
from bough.bench.measures import Call

if TYPE_CHECKING:
    from bough.bench.exchange import Answer


class Client:
    """One server and one model of it.

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
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        self._timeout = timeout
        self.ignore_eos = ignore_eos
        self.extra = extra or {}

    async def models(self) -> list[str]:
        """Names of the models that the server offers; ConfigError if it cannot be asked."""
        try:
            answer = await self._exchange("GET", "/models")
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            return [m["id"] for m in json.loads(answer.body)["data"]]
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
        body = json.dumps(self.body(prompt, tokens, fields)).encode()
        call = Call(asked=tokens * int(fields.get("n", 1)), start=time.perf_counter())
        try:
            answer = await self._exchange("POST", path, body)
            call.end = time.perf_counter()
            _read(answer, call)
        except (OSError, ValueError) as error:
            call.end = time.perf_counter()
            call.error = f"{type(error).__name__}: {error}"
        # A chunk holds at least one token; some servers count one choice of n only.
        call.n_generated = max(call.n_generated, sum(len(s) for s in call.stamps.values()))
        return call

    async def _exchange(self, method: str, path: str, body: bytes = b"") -> Answer:
        # Where an engine without a server is driven by a client of its own, what HTTP needs is not installed.
        from bough.bench.exchange import exchange

        return await exchange(method, self._base + path, self._headers, body, self._timeout)


def _read(answer: Answer, call: Call) -> None:
    """Take in server-sent events up to ``[DONE]``, now that all are there: decoding takes time from the server."""
    if answer.status != 200:
        call.error = f"HTTP {answer.status}: {answer.body.decode(errors='replace')[:300]}"
        return
    for line, now in answer.lines():
        if line.startswith(b"data:"):
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
