"""How many tokens the KV pool holds."""

from __future__ import annotations

from bough.base.config import KVConfig
from bough.base.errors import ConfigError

SMALLEST = 64
"""Tokens below which a pool serves nobody."""


def pool_tokens(config: KVConfig, bytes_per_token: int, free_bytes: int) -> int:
    """Size of the pool in tokens, a multiple of the page size.

    A pool may be smaller than the model's context: then it bounds the length of a sequence.

    Args:
        config: a size in tokens, or the share of ``free_bytes`` to take.
        bytes_per_token: KV of one token over all layers.
        free_bytes: memory that is free after the weights were loaded.

    Raises ConfigError for a pool that is too small to be of use, or an explicit size that does not fit.
    """
    page = config.page_size
    if config.pool_tokens is not None:
        tokens = config.pool_tokens // page * page
        if tokens * bytes_per_token > free_bytes:
            raise ConfigError(
                f"a KV pool of {tokens} tokens takes {_mb(tokens * bytes_per_token)}; {_mb(free_bytes)} are free",
                param="pool_tokens",
            )
    else:
        assert config.memory_share is not None
        tokens = int(free_bytes * config.memory_share) // bytes_per_token // page * page
    if tokens < max(SMALLEST, page):
        raise ConfigError(
            f"a KV pool of {tokens} tokens is too small ({_mb(bytes_per_token * SMALLEST)} hold {SMALLEST} tokens, "
            f"{_mb(free_bytes)} are free): raise the memory share or pool_tokens",
            param="memory_share",
        )
    return tokens


def _mb(n: int) -> str:
    return f"{n / 1e6:.0f} MB"
