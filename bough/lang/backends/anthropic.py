"""Anthropic's messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import AsyncBackend, Generated, several
from bough.lang.errors import BackendError
from bough.lang.http import CUT, retry_after
from bough.lang.params import SglSamplingParams
from bough.lang.templates import get_chat_template
from bough.lang.waiting import Connection
from bough.lang.wrapping import in_one_piece, unwrapped, wrap

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class Anthropic(AsyncBackend):
    """A model behind ``/v1/messages``. ``args`` and ``kwargs`` are those of :class:`anthropic.AsyncAnthropic`."""

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        import anthropic

        self.model_name = model_name
        self.chat_template = get_chat_template("claude")
        kwargs.setdefault("max_retries", 0)  # programs repeat what may pass
        self._connection = Connection(lambda: anthropic.AsyncAnthropic(*args, **kwargs))

    @property
    def client(self) -> Any:
        """Anthropic's client."""
        return self._connection.client

    def shutdown(self) -> None:
        """Close the connections; there are no calls after this."""
        self._connection.close()

    def get_model_name(self) -> str:
        return self.model_name

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        wrapped = wrap(s, sampling_params)
        request = self._request(s, sampling_params)

        async def once() -> tuple[str, Any]:
            answer = await self._call(self.client.messages.create(**request))
            text = "".join(block.text for block in answer.content if block.type == "text")
            return unwrapped(text) if wrapped else text, _meta(answer.usage)

        return await several(sampling_params.n, once)

    def agenerate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> AsyncIterator[tuple[str, Any]]:
        wrapped = wrap(s, sampling_params)
        pieces = self._pieces(self._request(s, sampling_params))
        return in_one_piece(pieces) if wrapped else pieces

    async def _pieces(self, request: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        complete = False
        async with await self._call(self.client.messages.create(stream=True, **request)) as events:
            async for event in events:
                if event.type == "content_block_delta" and event.delta.type == "text_delta":
                    yield event.delta.text, {}
                elif event.type == "message_delta":
                    yield "", _meta(event.usage)
                complete = complete or event.type == "message_stop"
        if not complete:
            raise BackendError(CUT)

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        messages = list(s.messages_) or [{"role": "user", "content": s.text_}]
        system = messages.pop(0)["content"] if messages[0]["role"] == "system" else ""
        kwargs = params.to_anthropic_kwargs()
        # Newer clients have no arguments for these, and newer models take no more than one of them. Older clients have
        # none for a format.
        sampling = {name: kwargs.pop(name) for name in ("temperature", "top_p", "top_k")}
        extra: dict[str, Any] = {name: value for name, value in sampling.items() if value not in (1.0, -1)}
        if params.json_schema is not None:
            extra["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(params.json_schema)}}
        return {
            "model": self.model_name, "system": system, "messages": messages, **kwargs,
            **({"extra_body": extra} if extra else {}),
        }  # fmt: skip

    async def _call(self, request: Any) -> Any:
        import anthropic

        try:
            return await request
        except anthropic.APIStatusError as error:
            raise BackendError(error.message, error.status_code, retry_after(error.response.headers)) from error
        except anthropic.APIConnectionError as error:
            raise BackendError(str(error)) from error


def _meta(usage: Any) -> dict[str, int]:
    """Anthropic counts cached tokens apart from the others."""
    cached = getattr(usage, "cache_read_input_tokens", None) or 0
    return {
        "prompt_tokens": (getattr(usage, "input_tokens", None) or 0) + cached,
        "completion_tokens": usage.output_tokens,
        "cached_tokens": cached,
    }
