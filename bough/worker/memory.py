"""How many tokens the KV pool holds."""

from __future__ import annotations

from bough.base.config import KVConfig
from bough.base.errors import ConfigError


def pool_tokens(config: KVConfig, bytes_per_token: int, context_length: int, free_bytes: int) -> int:
    """Size of the pool in tokens, a multiple of the page size.

    Args:
        config: a size in tokens, or the share of ``free_bytes`` to take.
        bytes_per_token: KV of one token over all layers.
        context_length: longest sequence that may be served.
        free_bytes: memory that is free after the weights were loaded.

    Raises ConfigError if the pool could not hold one sequence of ``context_length``, or if an explicit size does
    not fit in the free memory.
    """
    page = config.page_size
    needed = -(-context_length // page) * page
    if config.max_tokens is not None:
        tokens = config.max_tokens // page * page
        if tokens * bytes_per_token > free_bytes:
            raise ConfigError(
                f"a KV pool of {tokens} tokens takes {_mb(tokens * bytes_per_token)}; {_mb(free_bytes)} are free",
                param="max_tokens",
            )
        taken = f"max_tokens is {config.max_tokens}"
    else:
        tokens = int(free_bytes * config.memory_share) // bytes_per_token // page * page
        taken = f"a share of {config.memory_share:g} of {_mb(free_bytes)} free memory holds {tokens}"
    if tokens < needed:
        raise ConfigError(
            f"the KV pool must hold one sequence of {context_length} tokens ({_mb(needed * bytes_per_token)}), but "
            f"{taken}: lower the context length or raise the memory share",
            param="memory_share",
        )
    return tokens


def _mb(n: int) -> str:
    return f"{n / 1e6:.0f} MB"
