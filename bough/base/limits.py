"""The one table of bounds. Everything a client can make large has its number here.

The HTTP edge and the scheduler check requests against the same instance; ``/server_info`` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on one request, on its parts and on what waits. Bytes, tokens, counts and seconds as named."""

    body_bytes: int = 8 << 20
    header_bytes: int = 16 << 10
    header_count: int = 100
    json_depth: int = 32
    batch_prompts: int = 1024
    text_chars: int = 4 << 20
    n: int = 128
    sequences: int = 1024
    messages: int = 4096
    tools: int = 128
    tool_schema_bytes: int = 64 << 10
    rid_chars: int = 128
    stop_strings: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 256
    logprobs: int = 20
    logprob_token_ids: int = 256
    logit_bias: int = 1024
    logit_bias_abs: float = 100.0
    allowed_token_ids: int = 16384
    bad_words: int = 256
    bad_word_tokens: int = 64
    constraint_bytes: int = 256 << 10
    constraint_depth: int = 64
    constraint_whitespace: int = 256
    constraint_properties: int = 1000
    constraint_alternatives: int = 20_000
    constraint_nodes: int = 100_000
    constraint_ebnf_rules: int = 500
    constraint_chain: int = 200
    constraint_references: int = 500
    constraint_min_items: int = 1000
    constraint_multiple: int = 20_000
    constraint_structures: int = 256
    grammar_cache_bytes: int = 256 << 20
    reasoning_end_tokens: int = 32
    salt_chars: int = 256
    priority_abs: int = 1 << 20
    program_chars: int = 128
    program_width: int = 1024
    program_text_bytes: int = 64 << 20
    queue_requests: int = 4096
    queue_tokens: int = 16 << 20
    read_seconds: float = 30.0
    stream_buffer_tokens: int = 16384
    stream_stall_seconds: float = 30.0
    responses_bytes: int = 256 << 20
    responses_seconds: float = 24 * 3600.0
    responses_background: int = 256
    file_bytes: int = 200 << 20
    files: int = 10_000
    files_bytes: int = 8 << 30
    files_days: float = 30.0
    batches: int = 64
    batches_over: int = 1000
    batch_requests: int = 50_000
    batch_running: int = 32
    metadata: int = 16
    metadata_key_chars: int = 64
    metadata_value_chars: int = 512


DEFAULT_LIMITS = Limits()
