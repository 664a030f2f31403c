"""SGLang's modules that programs import from, and where their names live in bough."""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
        "ProgramStateGroup": "bough.lang.group",
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

    def __getattr__(self, name: str) -> Any:
        homes = MODULES[self.__name__]
        if name == "__all__":
            return _public(homes)
        home = homes.get(name, None if name.startswith("__") else homes.get("*"))
        if home is None:
            raise AttributeError(f"bough has no {self.__name__}.{name}")
        try:
            value = getattr(importlib.import_module(home), name)
        except AttributeError:
            raise AttributeError(f"bough has no {self.__name__}.{name}") from None
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_public(MODULES[self.__name__])})


def _public(homes: dict[str, str]) -> list[str]:
    """The names that ``from module import *`` binds."""
    names = [name for name in homes if not name.startswith("_") and name != "*"]
    if "*" in homes:
        home = vars(importlib.import_module(homes["*"]))
        names += [name for name, value in home.items() if name[0] != "_" and not isinstance(value, ModuleType)]
    return names


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of :data:`MODULES` before any other finder."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Alias(spec.name, f"bough under the name of {spec.name}.")

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: names are looked up when they are used."""


def install() -> ModuleType:
    """Make ``sglang`` and its modules importable as bough, and return it. An installed SGLang is hidden by it."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
    for name in MODULES:
        importlib.import_module(name)
    # A name that is also a module's: `from sglang import global_config` means the object.
    top = sys.modules["sglang"]
    vars(top)["global_config"] = importlib.import_module("bough.lang.config").global_config
    return top
