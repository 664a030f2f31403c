"""Request bodies of Ollama's API. Unknown fields are ignored; streaming is the default."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bough.server.schema import Unsupported

Think = bool | Literal["low", "medium", "high"]


class Options(msgspec.Struct, kw_only=True):
    """``options``: the sampler's, with Ollama's names. How a model is loaded is not a request's business here."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None


class OllamaRequest(Unsupported, kw_only=True):
    """What /api/chat and /api/generate have in common. ``keep_alive`` means nothing: the model stays."""

    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    keep_alive: float | str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """POST /api/chat."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None


UNSUPPORTED_GENERATE = ("suffix", "template", "context", "images")


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """POST /api/embed. ``truncate`` (the default) cuts a text to the context, in place of an error."""

    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """POST /api/embeddings, the older way."""

    prompt: str
    model: str | None = None
    options: Options | None = None
    keep_alive: float | str | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
