"""Whatever LiteLLM reaches."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import AsyncBackend, Generated
from bough.lang.params import SglSamplingParams
from bough.lang.templates import ChatTemplate, get_chat_template_by_model_path

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class LiteLLM(AsyncBackend):
    """A model by its name in LiteLLM, which must be installed."""

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
            "max_retries": litellm.num_retries if max_retries is None else max_retries,
            "default_headers": default_headers,
        }

    def get_model_name(self) -> str:
        return self.model_name

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        answer = await self._litellm.acompletion(**self._request(s, sampling_params))
        return answer.choices[0].message.content or "", _meta(getattr(answer, "usage", None))

    async def agenerate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> AsyncIterator[tuple[str, Any]]:
        async for event in await self._litellm.acompletion(stream=True, **self._request(s, sampling_params)):
            if event.choices and (text := event.choices[0].delta.content) is not None:
                yield text, {}

    def _request(self, s: StreamExecutor, params: SglSamplingParams) -> dict[str, Any]:
        messages = s.messages_ or [{"role": "user", "content": s.text_}]
        return {"model": self.model_name, "messages": messages, **self.client_params, **params.to_litellm_kwargs()}


def _meta(usage: Any) -> dict[str, int]:
    if usage is None:
        return {}
    return {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
