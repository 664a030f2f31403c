"""Sampling options of one generation, and what each kind of backend is told of them."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""

Strings = str | Sequence[str]


@dataclass
class SglSamplingParams:
    """In ``gen``, None means what the run says; a run has the defaults below.

    ``value_schema`` is the JSON Schema of the plain value that ``regex`` stands for, for APIs without the latter.
    """

    max_new_tokens: Any = 128
    min_new_tokens: Any = 0
    n: Any = 1
    stop: Any = ()
    stop_token_ids: Any = ()
    stop_regex: Any = ()
    temperature: Any = 1.0
    top_p: Any = 1.0
    top_k: Any = -1
    min_p: Any = 0.0
    frequency_penalty: Any = 0.0
    presence_penalty: Any = 0.0
    ignore_eos: Any = False
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    json_schema: str | None = None
    dtype: Any = None
    regex: str | None = None
    value_schema: dict[str, Any] | None = None

    def clone(self) -> SglSamplingParams:
        """A copy without ``dtype`` and ``regex``."""
        return dataclasses.replace(self, dtype=None, regex=None)

    def to_openai_kwargs(self) -> dict[str, Any]:
        self._warn_of_regex("OpenAI")
        return {
            "max_tokens": self.max_new_tokens,
            "max_completion_tokens": self.max_new_tokens,
            "n": self.n,
            "stop": self.stop or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def to_openai_extras(self) -> dict[str, Any]:
        """What OpenAI's API has no words for, as a server of bough takes it there; without what says nothing."""
        extras = {
            name: getattr(self, name) for name in ("regex", "stop_token_ids", "stop_regex") if getattr(self, name)
        }
        if self.top_k > 0:
            extras["top_k"] = self.top_k
        for name, field in (("min_p", "min_p"), ("min_tokens", "min_new_tokens"), ("ignore_eos", "ignore_eos")):
            if value := getattr(self, field):
                extras[name] = value
        return extras

    def to_vertexai_kwargs(self) -> dict[str, Any]:
        self._warn_of_regex("VertexAI")
        return {
            "candidate_count": 1,
            "max_output_tokens": self.max_new_tokens,
            "stop_sequences": self.stop,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k > 0 else None,
        }

    def to_anthropic_kwargs(self) -> dict[str, Any]:
        self._warn_of_regex("Anthropic")
        return {
            "max_tokens": self.max_new_tokens,
            "stop_sequences": [self.stop] if isinstance(self.stop, str) else self.stop,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }

    def to_litellm_kwargs(self) -> dict[str, Any]:
        self._warn_of_regex("LiteLLM")
        return {
            "max_tokens": self.max_new_tokens,
            "stop": self.stop or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }

    def to_srt_kwargs(self) -> dict[str, Any]:
        """``sampling_params`` of a /generate request."""
        return {name: getattr(self, name) for name in _SRT}

    def _warn_of_regex(self, backend: str) -> None:
        if self.regex is not None:
            warnings.warn(f"Regular expression is not supported in the {backend} backend.", stacklevel=3)


_SRT = ("max_new_tokens", "min_new_tokens", "n", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p",
        "top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "regex", "json_schema")  # fmt: skip

NAMES = tuple(f.name for f in dataclasses.fields(SglSamplingParams))

LOGPROB_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
"""They stand beside ``sampling_params`` in a /generate request."""


def resolve(defaults: SglSamplingParams, given: SglSamplingParams, stop_str: Sequence[str]) -> SglSamplingParams:
    """The options of one generation: the run's, what ``gen`` says instead, and the template's stop texts."""
    params = copy.copy(defaults)
    for name in NAMES:
        value = getattr(given, name)
        if value is not None:
            setattr(params, name, value)
    for name in ("stop", "stop_token_ids", "stop_regex"):
        if isinstance(value := getattr(params, name), list):
            setattr(params, name, list(value))
    if stop_str:
        params.stop = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        params.stop += stop_str
    return params


def apply_dtype(params: SglSamplingParams) -> None:
    """Express ``dtype`` by a regular expression and stop texts. Raises RuntimeError for a type that has none."""
    if params.dtype is None:
        return
    if params.regex is not None:
        warnings.warn(
            f"Both dtype and regex are set. Only dtype will be used. dtype: {params.dtype}, regex: {params.regex}",
            stacklevel=2,
        )
    if params.dtype in ("int", int, "float", float):
        params.regex = REGEX_INT if params.dtype in ("int", int) else REGEX_FLOAT
        stop = [params.stop] if isinstance(params.stop, str) else list(params.stop)
        params.stop = [*stop, " ", "\n"]
    elif params.dtype in ("str", str):
        params.regex = REGEX_STR
    elif params.dtype in ("bool", bool):
        params.regex = REGEX_BOOL
    else:
        raise RuntimeError(f"Invalid dtype: {params.dtype}")
