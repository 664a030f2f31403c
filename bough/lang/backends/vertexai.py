"""Gemini models behind Vertex AI."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import BaseBackend, Generated, in_thread, several
from bough.lang.params import SglSamplingParams
from bough.lang.wrapping import in_one_piece, unwrapped, wrap

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class VertexAI(BaseBackend):
    """A model of the project in GCP_PROJECT_ID, at GCP_LOCATION. Needs Google's ``vertexai`` package."""

    def __init__(self, model_name: str, safety_settings: Any = None) -> None:
        super().__init__()
        vertexai = importlib.import_module("vertexai")
        self._models: Any = importlib.import_module("vertexai.preview.generative_models")
        self._unparsed: Any = importlib.import_module("google.protobuf.json_format").ParseError
        vertexai.init(project=os.environ["GCP_PROJECT_ID"], location=os.environ.get("GCP_LOCATION"))
        self.model_name = model_name
        self.safety_settings = safety_settings

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str, Any]:
        answer = self._answer(s, sampling_params)
        return answer.text, _meta(answer)

    async def agenerate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        wrapped = wrap(s, sampling_params)

        async def once() -> tuple[str, Any]:
            text, meta = await in_thread(lambda: self.generate(s, sampling_params))
            return unwrapped(text) if wrapped else text, meta

        return await several(sampling_params.n, once)

    def agenerate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> AsyncIterator[tuple[str, Any]]:
        wrapped = wrap(s, sampling_params)
        pieces = super().agenerate_stream(s, sampling_params)
        return in_one_piece(pieces) if wrapped else pieces

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator[tuple[str, Any]]:
        for piece in self._answer(s, sampling_params, stream=True):
            yield piece.text, _meta(piece)

    def _answer(self, s: StreamExecutor, params: SglSamplingParams, **options: Any) -> Any:
        return self._models.GenerativeModel(self.model_name).generate_content(
            contents_of(s.messages_) if s.messages_ else s.text_,
            generation_config=self._config(params),
            safety_settings=self.safety_settings,
            **options,
        )

    def _config(self, params: SglSamplingParams) -> Any:
        given = params.to_vertexai_kwargs()
        if params.json_schema is not None:
            given["response_mime_type"] = "application/json"
            with suppress(self._unparsed):  # its schemas are a subset, without null; any JSON is better than any text
                return self._models.GenerationConfig(**given, response_schema=json.loads(params.json_schema))
        return self._models.GenerationConfig(**given)


def _meta(answer: Any) -> dict[str, int]:
    usage = answer.usage_metadata
    return {
        "prompt_tokens": usage.prompt_token_count,
        "completion_tokens": usage.candidates_token_count,
        "cached_tokens": usage.cached_content_token_count,
    }


def contents_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in Vertex AI's format, which has no system messages."""
    contents: list[dict[str, Any]] = []
    for message in messages:
        given = message["content"]
        first, *images = given if isinstance(given, list) else [{"text": given}]
        parts: list[dict[str, Any]] = [{"text": first["text"]}]
        for image in images:
            data = image["image_url"]["url"].partition(",")[2]
            parts.append({"inline_data": {"data": data, "mime_type": "image/jpeg"}})
        if message["role"] == "system":
            warnings.warn("Warning: system prompt is not supported in VertexAI.", stacklevel=2)
            contents.append({"role": "user", "parts": [{"text": "System prompt: " + first["text"]}]})
            contents.append({"role": "model", "parts": [{"text": "Understood."}]})
        else:
            contents.append({"role": "model" if message["role"] == "assistant" else "user", "parts": parts})
    return contents
