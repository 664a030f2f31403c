"""SGLang's modules that programs import from, and where their names live in bough."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

_TOP = """function gen gen_int gen_string select image video system user assistant system_begin system_end user_begin
user_end assistant_begin assistant_end separate_reasoning set_default_backend flush_cache get_server_info Runtime
RuntimeEndpoint Engine ServerArgs global_config token_length_normalized greedy_token_selection
unconditional_likelihood_normalized OpenAI Anthropic LiteLLM VertexAI Crusoe __version__""".split()

_API = "bough.lang.api"
_BACKENDS = "bough.lang.backends"
_TESTS = "bough.compat.sglang.test_utils"

MODULES: dict[str, dict[str, str]] = {
    "sglang": dict.fromkeys(_TOP, "bough"),
    "sglang.api": dict.fromkeys(_TOP, "bough"),
    "sglang.version": {"__version__": "bough"},
    "sglang.global_config": {"global_config": "bough.lang.config", "GlobalConfig": "bough.lang.config"},
    "sglang.utils": {"*": "bough.compat.sglang.utils"},
    "sglang.lang": {},
    "sglang.lang.api": {"*": _API, "Runtime": "bough", "Engine": "bough", "global_config": "bough"},
    "sglang.lang.choices": {"*": "bough.lang.choices"},
    "sglang.lang.chat_template": {"*": "bough.lang.templates"},
    "sglang.lang.global_config": {"*": "bough.lang.config"},
    "sglang.lang.ir": {
        "*": "bough.lang.ir",
        "SglFunction": "bough.lang.function",
        "SglSamplingParams": "bough.lang.params",
    },
    "sglang.lang.interpreter": {
        "StreamExecutor": "bough.lang.executor",
        "ProgramState": "bough.lang.state",
        "ProgramStateGroup": "bough.lang.state",
        "run_program": "bough.lang.run",
        "run_program_batch": "bough.lang.run",
        "cache_program": "bough.lang.run",
    },
    "sglang.lang.tracer": {"*": "bough.lang.trace"},
    "sglang.lang.backend": {},
    "sglang.lang.backend.base_backend": {"BaseBackend": f"{_BACKENDS}.base"},
    "sglang.lang.backend.runtime_endpoint": {
        "RuntimeEndpoint": f"{_BACKENDS}.endpoint",
        "Runtime": f"{_BACKENDS}.runtime",
        "compute_normalized_prompt_logprobs": "bough.compat.sglang.utils",
    },
    "sglang.lang.backend.openai": {"OpenAI": f"{_BACKENDS}.openai", "TokenUsage": f"{_BACKENDS}.openai"},
    "sglang.lang.backend.anthropic": {"Anthropic": f"{_BACKENDS}.anthropic"},
    "sglang.lang.backend.litellm": {"LiteLLM": f"{_BACKENDS}.litellm"},
    "sglang.lang.backend.vertexai": {"VertexAI": f"{_BACKENDS}.vertexai"},
    "sglang.lang.backend.crusoe": {"Crusoe": f"{_BACKENDS}.crusoe"},
    "sglang.test": {},
    "sglang.test.test_utils": {"*": _TESTS},
    "sglang.test.test_programs": {"*": "bough.compat.sglang.test_programs"},
    "sglang.srt": {},
    "sglang.srt.constrained": {},
    "sglang.srt.constrained.outlines_backend": {"build_regex_from_object": "bough.compat.sglang.utils"},
    "sglang.srt.utils": {"kill_process_tree": "bough.compat.sglang.utils"},
    "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": "bough.compat.sglang.utils"},
    "sglang.srt.hf_transformers_utils": {"get_tokenizer": "bough.compat.sglang.utils"},
    "sglang.srt.server_args": {"ServerArgs": "bough"},
}
"""SGLang's module -> name -> bough's module; ``*`` is the module of all names that are not listed."""


class _Alias(ModuleType):
    """A module whose names are looked up where they live, when they are first used."""

    def __init__(self, name: str, homes: dict[str, str]) -> None:
        super().__init__(name, f"bough under the name of {name}.")
        self.__path__: list[str] = []
        self._homes = homes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in self._homes:
            raise AttributeError(name)
        home = self._homes.get(name, self._homes.get("*"))
        if home is None:
            raise AttributeError(f"bough has no {self.__name__}.{name}")
        try:
            value = getattr(importlib.import_module(home), name)
        except AttributeError:
            raise AttributeError(f"bough has no {self.__name__}.{name}") from None
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in self._homes if name != "*")})


def install() -> ModuleType:
    """Make ``sglang`` and its modules importable as bough, and return it. An installed SGLang is hidden by it."""
    for name, homes in MODULES.items():
        if isinstance(sys.modules.get(name), _Alias):
            continue
        module = _Alias(name, homes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    # A name that is also a module's: `from sglang import global_config` means the object.
    top = sys.modules["sglang"]
    vars(top)["global_config"] = importlib.import_module("bough.lang.config").global_config
    vars(top)["__all__"] = [name for name in _TOP if name != "__version__"]
    return top
