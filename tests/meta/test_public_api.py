"""The public surface is pinned; growing it is a decision."""

from __future__ import annotations

import bough

PUBLIC = [
    "Anthropic",
    "AsyncEngine",
    "Crusoe",
    "Engine",
    "FakeBackend",
    "InvalidAnswer",
    "LimitExceeded",
    "Limits",
    "LiteLLM",
    "OpenAI",
    "ProgramError",
    "Retry",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "ServerArgs",
    "VertexAI",
    "act",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "record",
    "replay",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "tool",
    "tools_prompt",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def test_public_names() -> None:
    assert sorted(bough.__all__) == PUBLIC


def test_public_names_exist() -> None:
    for name in bough.__all__:
        assert getattr(bough, name) is not None
