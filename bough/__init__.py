"""bough: an LLM inference and serving system whose unit of work is the program.

``import bough as sgl`` runs programs that were written for SGLang.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.base.params import SamplingParams
    from bough.engine.async_engine import AsyncEngine
    from bough.engine.engine import Engine
    from bough.lang.api import (
        act,
        assistant,
        assistant_begin,
        assistant_end,
        flush_cache,
        function,
        gen,
        gen_int,
        gen_string,
        get_server_info,
        image,
        select,
        separate_reasoning,
        set_default_backend,
        system,
        system_begin,
        system_end,
        user,
        user_begin,
        user_end,
        video,
    )
    from bough.lang.backends.anthropic import Anthropic
    from bough.lang.backends.crusoe import Crusoe
    from bough.lang.backends.endpoint import RuntimeEndpoint
    from bough.lang.backends.litellm import LiteLLM
    from bough.lang.backends.openai import OpenAI
    from bough.lang.backends.runtime import Runtime, ServerArgs
    from bough.lang.backends.vertexai import VertexAI
    from bough.lang.choices import (
        greedy_token_selection,
        token_length_normalized,
        unconditional_likelihood_normalized,
    )
    from bough.lang.config import global_config
    from bough.lang.errors import (
        InvalidAnswer,
        LimitExceeded,
        ProgramError,
    )
    from bough.lang.fake import FakeBackend
    from bough.lang.limits import Limits, Retry
    from bough.lang.record import record, replay
    from bough.lang.tools import tool, tools_prompt

__version__ = "0.1.0"

__all__ = [
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

_NAMES = {
    "bough.base.params": ("SamplingParams",),
    "bough.engine.async_engine": ("AsyncEngine",),
    "bough.engine.engine": ("Engine",),
    "bough.lang.api": (
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
        "image",
        "select",
        "separate_reasoning",
        "set_default_backend",
        "system",
        "system_begin",
        "system_end",
        "user",
        "user_begin",
        "user_end",
        "video",
    ),
    "bough.lang.backends.anthropic": ("Anthropic",),
    "bough.lang.backends.crusoe": ("Crusoe",),
    "bough.lang.backends.endpoint": ("RuntimeEndpoint",),
    "bough.lang.backends.litellm": ("LiteLLM",),
    "bough.lang.backends.openai": ("OpenAI",),
    "bough.lang.backends.runtime": (
        "Runtime",
        "ServerArgs",
    ),
    "bough.lang.backends.vertexai": ("VertexAI",),
    "bough.lang.choices": (
        "greedy_token_selection",
        "token_length_normalized",
        "unconditional_likelihood_normalized",
    ),
    "bough.lang.config": ("global_config",),
    "bough.lang.errors": (
        "InvalidAnswer",
        "LimitExceeded",
        "ProgramError",
    ),
    "bough.lang.fake": ("FakeBackend",),
    "bough.lang.limits": (
        "Limits",
        "Retry",
    ),
    "bough.lang.record": (
        "record",
        "replay",
    ),
    "bough.lang.tools": (
        "tool",
        "tools_prompt",
    ),
}
"""Module -> the public names that it is the home of."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `bough --help` and servers need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
