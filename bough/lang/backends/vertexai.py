"""Gemini models behind Vertex AI."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bough.lang.backends.base import BaseBackend, Generated
from bough.lang.params import SglSamplingParams

if TYPE_CHECKING:
    from bough.lang.executor import StreamExecutor


class VertexAI(BaseBackend):
    """A model of the project in GCP_PROJECT_ID, at GCP_LOCATION. Needs Google's ``vertexai`` package."""

    def __init__(self, model_name: str, safety_settings: Any = None) -> None:
        super().__init__()
        vertexai = importlib.import_module("vertexai")
        self._models: Any = importlib.import_module("vertexai.preview.generative_models")
        vertexai.init(project=os.environ["GCP_PROJECT_ID"], location=os.environ.get("GCP_LOCATION"))
        self.model_name = model_name
        self.safety_settings = safety_settings

    def get_model_name(self) -> str:
        return self.model_name

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Generated:
        return self._answer(s, sampling_params).text, {}

    def generate_stream(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> Iterator[tuple[str, Any]]:
        for piece in self._answer(s, sampling_params, stream=True):
            yield piece.text, {}

    def _answer(self, s: StreamExecutor, params: SglSamplingParams, **options: Any) -> Any:
        return self._models.GenerativeModel(self.model_name).generate_content(
            contents_of(s.messages_) if s.messages_ else s.text_,
            generation_config=self._models.GenerationConfig(**params.to_vertexai_kwargs()),
            safety_settings=self.safety_settings,
            **options,
        )


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
