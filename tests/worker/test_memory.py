"""The size of the KV pool."""

from __future__ import annotations

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.device.ops.cells import QuantizedCells
from bough.models.base import CacheSpec, KVShape
from bough.worker.kv_pool import KVPool
from bough.worker.memory import pool_tokens


def test_the_share_is_rounded_down_to_pages() -> None:
    assert pool_tokens(KVConfig(memory_share=0.5, page_size=16), 100, 1_000_000) == 4992


def test_a_given_size_is_taken_as_it_is() -> None:
    assert pool_tokens(KVConfig(pool_tokens=1000, page_size=16), 100, 1_000_000) == 992


@pytest.mark.parametrize(
    ("config", "free"),
    [
        (KVConfig(memory_share=0.5), 10_000),
        (KVConfig(pool_tokens=63), 1_000_000),
        (KVConfig(pool_tokens=127, page_size=128), 1_000_000),
        (KVConfig(pool_tokens=20_000), 1_000_000),
    ],
)
def test_a_pool_that_serves_nobody_or_does_not_fit_is_refused(config: KVConfig, free: int) -> None:
    with pytest.raises(ConfigError):
        pool_tokens(config, 100, free)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_the_pool_has_the_bytes_it_says(dtype: torch.dtype) -> None:
    shape = KVShape((CacheSpec(2, 8, 8),) * 2 + (CacheSpec(3, 10, 0),), dtype)
    pool = KVPool(shape, 50, torch.device("cpu"))
    tensors = []
    for cells in (*pool.k, *pool.v):
        tensors += [cells.data, cells.scale] if isinstance(cells, QuantizedCells) else [cells]
    assert sum(t.nbytes for t in tensors) == (50 + 1) * shape.bytes_per_token, "and the cell that is nobody's"
    assert pool.k[1].shape == (51, 2, 8) and pool.k[2].shape == (51, 3, 10)
