"""Settings of the language that hold for the whole process."""

from __future__ import annotations

from typing import Any


class GlobalConfig:
    """Mutable settings, with SGLang's names and defaults.

    Attributes:
        verbosity: 2 or more prints the text of every finished run.
        default_backend: of programs that are run without ``backend=``.
        skip_special_tokens_in_output, spaces_between_special_tokens_in_out: sent with every generation.
        enable_precache_with_tracing: a batch first has the constant beginning of its program computed.
        enable_parallel_encoding: join answers as KV where a backend can.
        enable_prefetch: tell the engine what earlier runs appended after a call, so that it is computed while the
            program is away; not SGLang's.
    """

    def __init__(self) -> None:
        self.verbosity = 0
        self.default_backend: Any = None
        self.skip_special_tokens_in_output = True
        self.spaces_between_special_tokens_in_out = True
        self.enable_precache_with_tracing = True
        self.enable_parallel_encoding = True
        self.enable_prefetch = True


global_config = GlobalConfig()
