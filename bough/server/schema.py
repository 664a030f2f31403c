"""Request bodies, as clients of OpenAI, SGLang and vLLM send them.

Unknown fields are ignored. Every field of :class:`Unsupported` asks for something that would change the
answer and that this version cannot do: setting one is refused, never ignored. ``None`` always means the
default; the defaults of sampling are OpenAI's (temperature 1, top_p 1, no top_k), not the model folder's.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from bough.base.errors import InvalidRequest
from bough.base.program import Program

T = TypeVar("T")

Tokens = list[int]
Prompt = str | list[int | str | list[int]]
"""One prompt as text or ids, or several."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's way to constrain an answer; exactly one of the first six is set.

    There is nothing to fall back to; the last two are refused.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None
    backend: str | None = None


class Constrained(msgspec.Struct, kw_only=True):
    """The ways to constrain an answer: OpenAI's, vLLM's with its older names, SGLang's; at most one is used."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class Unsupported(Constrained, kw_only=True):
    """Besides, fields that are refused unless they are absent, null, false or empty."""

    lora_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    logits_processors: Any = None
    watermark: Any = None
    watermarking: Any = None
    use_beam_search: Any = None
    repetition_detection: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_token_offsets: Any = None
    return_sampling_mask: Any = None
    return_meta_info: Any = None
    return_input_ids_in_sglext: Any = None
    return_output_ids_in_sglext: Any = None
    return_cached_tokens_details: Any = None
    return_spec_tokens_details: Any = None
    return_weight_versions: Any = None
    return_flat_raw_output_top_logprobs: Any = None
    sampling_logprobs_mode: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    bootstrap_pair_key: Any = None


class Sampling(Unsupported, kw_only=True):
    """What /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    lora_path: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
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
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Tokens | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    timeout: float | None = None
    priority: int | None = None
    rid: str | list[str] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    echo: bool | None = None
    user: str | None = None
    program: Program | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None


class CompletionRequest(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None
    prompt_embeds: Any = None
    add_special_tokens: bool | None = None


class Switch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """SGLang's ``thinking``: whether the model's template has it reason."""

    type: Literal["enabled", "disabled"]


class ChatRequest(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    input_ids: Tokens | None = None
    reasoning_effort: str | None = None
    thinking: Switch | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    prediction: dict[str, Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    moderation: Any = None
    chat_template: Any = None
    add_special_tokens: Any = None
    task: Any = None
    return_prompt_text: bool | None = None


class NativeSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``sampling_params`` of /generate, under SGLang's names; an unknown name is an error."""

    max_new_tokens: int | None | msgspec.UnsetType = msgspec.UNSET
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Tokens | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    logit_bias: dict[int, float] | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: list[str] | None = None
    stream_interval: int | None = None
    regex: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    custom_params: Any = None
    beam_width: Any = None


class UnsupportedNative(Constrained, kw_only=True):
    """Fields of /generate that are refused unless they are absent, null, false or empty."""

    input_embeds: Any = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    mm_hashes: Any = None
    mm_content_hashes: Any = None
    lora_id: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    positional_embed_overrides: Any = None
    watermark: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    return_indexer_topk: Any = None
    return_entropy: Any = None
    return_sampling_mask: Any = None
    sampling_logprobs_mode: Any = None
    return_flat_raw_top_logprobs: Any = None
    return_flat_raw_output_top_logprobs: Any = None
    return_flat_raw_top_logprobs_b64: Any = None
    return_bytes: Any = None
    multi_item_delimiter_indices: Any = None
    token_indices_to_pool: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    bootstrap_pair_key: Any = None


class Prefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first ``chars`` characters (None: all) of prompt and answer of the call ``node`` of ``program``.

    ``id`` is what the server said of the text that is meant; None: the latest of that call, which may have been made
    more than once.
    """

    program: str
    node: str
    id: str | None = None
    chars: int | None = None


class GenerateRequest(UnsupportedNative, kw_only=True):
    """POST /generate. A list in the place of a value gives one value per prompt."""

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int]] | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    max_thinking_tokens: int | None = None
    require_reasoning: bool | None = None
    modalities: list[str] | None = None
    priority: int | None = None
    timeout: float | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    program: Program | list[Program] | None = None
    prefix: Prefix | None = None
    lease: float | list[float] | None = None
    lora_path: str | list[str | None] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: ``prompt`` (one text or several) or ``messages``."""

    model: str | None = None
    prompt: str | list[str] | None = None
    prefix: Prefix | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class ParseCallsRequest(msgspec.Struct, kw_only=True):
    """POST /parse_function_call: tool calls in a text that was generated elsewhere."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class SeparateReasoningRequest(msgspec.Struct, kw_only=True):
    """POST /separate_reasoning: the reasoning in a text that was generated elsewhere."""

    text: str
    reasoning_parser: str | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    """POST /abort_request."""

    rid: str | None = None
    abort_all: bool | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/load_lora_adapter and /load_lora_adapter; ``lora_path`` lies in the server's folder of adapters."""

    lora_name: str
    lora_path: str | None = None
    pinned: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """POST /v1/unload_lora_adapter and /unload_lora_adapter."""

    lora_name: str


class Empty(msgspec.Struct):
    """A body that does not matter."""


CONSTRAINTS = tuple(Constrained.__struct_fields__)
UNSUPPORTED = tuple(name for name in Unsupported.__struct_fields__ if name not in CONSTRAINTS)
UNSUPPORTED_COMPLETION = (*UNSUPPORTED, "suffix", "prompt_embeds")
UNSUPPORTED_CHAT = (
    *UNSUPPORTED,
    "audio",
    "web_search_options",
    "moderation",
    "chat_template",
    "add_special_tokens",
    "task",
)
UNSUPPORTED_NATIVE_SAMPLING = ("custom_params", "beam_width")
UNSUPPORTED_NATIVE = tuple(name for name in UnsupportedNative.__struct_fields__ if name not in CONSTRAINTS)


REASONS = {
    "conversation": "conversations are not stored; previous_response_id continues a response",
    "suffix": "this server continues text and does not insert into it",
    "prompt_embeds": "prompts are text or token ids",
    "lora_id": "lora_path, or the model's name, says which adapter is meant",
    "input_embeds": "prompts are text or token ids",
    "return_entropy": "logprobs of alternatives are what is reported of a distribution",
    "return_sampling_mask": "logprobs of alternatives are what is reported of a distribution",
    "return_meta_info": "/generate answers with it",
    "return_input_ids_in_sglext": "return_prompt_token_ids does the same",
    "return_output_ids_in_sglext": "return_token_ids does the same",
    "return_cached_tokens_details": "usage.prompt_tokens_details says how many tokens came from the cache",
    "vllm_xargs": "there are no processors that would read them",
    "add_special_tokens": "the model's template writes the special tokens",
    "previous_input_messages": "previous_response_id, or the items of input, continue a conversation",
    "enable_response_messages": "return_token_ids of /v1/chat/completions shows what the model read and wrote",
    "request_id": "the server names responses; the header x-request-id names a request",
    "mm_hashes": "text is the only modality",
    "mm_content_hashes": "text is the only modality",
    **{f"bootstrap_{name}": "prefill and decode run in one engine" for name in ("host", "port", "room", "pair_key")},
    "audio": "this server generates text only",
    "web_search_options": "this server has no access to the web",
    "moderation": "this server has no moderation model",
    "chat_template": "templates of clients are not run; chat_template_kwargs sets what the model's own template reads",
}


def refuse_unsupported(body: object, names: tuple[str, ...]) -> None:
    """Raises InvalidRequest naming the first of ``names`` that is set."""
    for name in names:
        if getattr(body, name):
            reason = f": {REASONS[name]}" if name in REASONS else " yet by this version"
            raise InvalidRequest(f"{name} is not supported{reason}", param=name)


def refuse_constraints(body: Constrained, names: tuple[str, ...], instead: str) -> None:
    """Raises InvalidRequest naming the first of ``names`` that is set, and what does the same here."""
    for name in names:
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name} is not read here: {instead} constrains the answer", param=name)


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """Not strict, because clients send 16.0 for 16; booleans and text for structures remain errors."""
    return msgspec.json.Decoder(kind, strict=False)
