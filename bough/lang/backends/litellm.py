"""Whatever LiteLLM reaches."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import AsyncBackend, Generated, several
from bough.lang.errors import BackendError
from bough.lang.http import retry_after
from bough.lang.params import SglSamplingParams
from bough.lang.templates import ChatTemplate, get_chat_template_by_model_path
from bough.lang.wrapping import in_one_piece, unwrapped, wrap

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class LiteLLM(AsyncBackend):
    """A model by its name in LiteLLM, which must be installed.

    It repeats nothing unless ``max_retries`` or ``litellm.num_retries`` says so, since programs do.
    """

    def __init__(
        self,
        model_name: str,
        chat_template: ChatTemplate | None = None,
        api_key: str | None = None,
        organization: str | None = None,
        base_url: str | None = None,
        timeout: float | None = 600,
        max_retries: int | None = None,
        default_headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        import litellm

        self._litellm: Any = litellm
        self.model_name = model_name
        self.chat_template = chat_template or get_chat_template_by_model_path(model_name)
        self.client_params = {
            "api_key": api_key,
            "organization": organization,
            "base_url": base_url,
            "timeout": timeout,
            "max_retries": (litellm.num_retries or 0) if max_retries is None else max_retries,
            "default_headers": default_headers,
        }

    def get_model_name(self) -> str:
        return self.model_name

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        wrapped = wrap(s, sampling_params)
        request = self._request(s, sampling_params)

        async def once() -> tuple[str, Any]:
            with _translated():
                answer = await self._litellm.acompletion(**request)
            text = answer.choices[0].message.content or ""
            return unwrapped(text) if wrapped else text, _meta(getattr(answer, "usage", None))

        return await several(sampling_params.n, once)

    def agenerate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> AsyncIterator[tuple[str, Any]]:
        wrapped = wrap(s, sampling_params)
        pieces = self._pieces(self._request(s, sampling_params))
        return in_one_piece(pieces) if wrapped else pieces

    async def _pieces(self, request: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
        request |= {"stream": True, "stream_options": {"include_usage": True}}
        with _translated():
            async for event in await self._litellm.acompletion(**request):
                if event.choices and (text := event.choices[0].delta.content) is not None:
                    yield text, {}
                if (usage := getattr(event, "usage", None)) is not None:
                    yield "", _meta(usage)

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        messages = s.messages_ or [{"role": "user", "content": s.text_}]
        request = {"model": self.model_name, "messages": messages, **self.client_params, **params.to_litellm_kwargs()}
        if params.json_schema is not None:
            schema = {"name": "answer", "schema": json.loads(params.json_schema), "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return request


@contextmanager
def _translated() -> Iterator[None]:
    """What LiteLLM raises in here as a BackendError. Its errors derive from those of OpenAI's client."""
    import openai

    try:
        yield
    except openai.APIError as error:
        # It gives a status to errors that had none, and that of a server's error to connections that failed.
        reached = not isinstance(error, openai.APIConnectionError) and "Connection error" not in error.message
        status = int(getattr(error, "status_code", 0)) if reached else 0
        headers = getattr(error, "litellm_response_headers", None) or {}
        raise BackendError(error.message, status, retry_after(headers)) from error


def _meta(usage: Any) -> dict[str, int]:
    if usage is None:
        return {}
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
