"""How many tokens the KV pool holds."""

from __future__ import annotations

from typing import NamedTuple

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.models.base import KVShape

SMALLEST = 64
"""Tokens below which a pool serves nobody."""


LONGEST = 8
"""Times the cells of windows that a pool counts where all layers see one, and the others' cells cost nothing."""


class PoolSize(NamedTuple):
    """Cells of the pool, and those of layers that see a window, where they are fewer; both whole pages."""

    tokens: int
    window_tokens: int | None = None


def window_need(window: int, n_rows: int, step_tokens: int, page_size: int) -> int:
    """Cells of layers that see a window for ``n_rows`` rows and one step of new tokens, and as many windows again for
    sequences that have ended and may be taken up; whole pages."""
    one = window + 2 * page_size
    return -(-(2 * n_rows * one + step_tokens) // page_size) * page_size


def pool_size(config: KVConfig, shape: KVShape, free_bytes: int, need: int | None = None) -> PoolSize:
    """Size of the pool.

    A pool may be smaller than the model's context: then it bounds the length of a sequence.

    Args:
        config: a size in tokens, or the share of ``free_bytes`` to take.
        shape: what a token's KV takes.
        free_bytes: memory that is free after the weights were loaded.
        need: cells that layers which see a window need, if they may have fewer than the others.

    Raises ConfigError for a pool that is too small to be of use, or an explicit size that does not fit.
    """
    page, whole = config.page_size, shape.bytes_per_token
    seeing = shape.window_bytes_per_token
    if config.pool_tokens is not None:
        tokens = config.pool_tokens // page * page
        taken = tokens * whole
        if need is not None and need < tokens:
            taken -= (tokens - need) * seeing
        if taken > free_bytes:
            raise ConfigError(
                f"a KV pool of {tokens} tokens takes {_mb(taken)}; {_mb(free_bytes)} are free", param="pool_tokens"
            )
    else:
        assert config.memory_share is not None
        memory = int(free_bytes * config.memory_share)
        tokens = memory // whole // page * page
        if need is not None and need < tokens:
            others = whole - seeing
            tokens = (memory - need * seeing) // others // page * page if others else LONGEST * tokens
            need = need if others else memory // whole // page * page
    if tokens < max(SMALLEST, page):
        raise ConfigError(
            f"a KV pool of {tokens} tokens is too small ({_mb(whole * SMALLEST)} hold {SMALLEST} tokens, "
            f"{_mb(free_bytes)} are free): raise the memory share or pool_tokens",
            param="memory_share",
        )
    return PoolSize(tokens, need if need is not None and need < tokens else None)


def _mb(n: int) -> str:
    return f"{n / 1e6:.0f} MB"
