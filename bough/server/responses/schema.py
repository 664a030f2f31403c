"""The body of POST /v1/responses. Fields that share their name with chat completions mean the same there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bough.base.program import Program
from bough.server.schema import CONSTRAINTS, UNSUPPORTED, Tokens, Unsupported


class Reasoning(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Unsupported, kw_only=True):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    background: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    program: Program | None = None
    access_programs: Any = None
    image: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    previous_input_messages: Any = None
    enable_response_messages: Any = None
    request_id: Any = None
    # As SGLang and vLLM extend it
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: list[str] | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    include_reasoning: bool | None = None
    lora_path: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    timeout: float | None = None


UNSUPPORTED_RESPONSES = (
    *UNSUPPORTED, "conversation", "prompt", "context_management", "moderation", "previous_input_messages",
    "enable_response_messages", "request_id",
)  # fmt: skip
INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")
SAME_IN_CHAT = (
    "model", "temperature", "top_p", "parallel_tool_calls", "metadata", "service_tier", "user", "safety_identifier",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "program", "seed", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "min_tokens", "stop", "stop_regex",
    "stop_token_ids", "no_stop_trim", "include_stop_str_in_output", "ignore_eos", "skip_special_tokens",
    "spaces_between_special_tokens", "allowed_token_ids", "bad_words", "thinking_token_budget", "max_thinking_tokens",
    "include_reasoning", "lora_path", "chat_template_kwargs", "priority", "cache_salt", "extra_key", "timeout",
    *(name for name in CONSTRAINTS if name != "response_format"),
)  # fmt: skip
