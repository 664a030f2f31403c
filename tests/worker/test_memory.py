"""The size of the KV pool."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import PAGESIZE
from typing import Any

import pytest
import torch

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.device.attention.base import AttentionBatch
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.ops.cells import QuantizedCells
from bough.models.base import CacheSpec, KVShape
from bough.weights.loader import open_checkpoint
from bough.worker import kv_pool
from bough.worker.build import WorkerSizes, build_worker
from bough.worker.kv_pool import KVPool
from bough.worker.memory import LONGEST, PoolSize, pool_size, window_need
from tests.driving import device_parts

PLAIN = KVShape((CacheSpec(1, 10, 10),) * 5, torch.int8)
"""140 bytes per token."""

MIXED = KVShape((CacheSpec(1, 16, 16), *(CacheSpec(1, 16, 16, window=8),) * 3), torch.float32)
"""128 bytes per token in each layer, of which three see a window."""


def test_the_share_is_rounded_down_to_pages() -> None:
    assert pool_size(KVConfig(memory_share=0.5, page_size=16), PLAIN, 1_400_000) == PoolSize(4992)


def test_a_given_size_is_taken_as_it_is() -> None:
    assert pool_size(KVConfig(pool_tokens=1000, page_size=16), PLAIN, 1_000_000) == PoolSize(992)


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
        pool_size(config, PLAIN, free)


def test_windows_take_what_they_need_and_leave_the_rest_to_the_other_layers() -> None:
    config, need = KVConfig(memory_share=1.0, page_size=16), window_need(8, 4, 64, 16)
    assert need == 2 * 4 * (8 + 32) + 64
    memory = 10_000 * MIXED.bytes_per_token
    size = pool_size(config, MIXED, memory, need)
    assert size.window_tokens == need and size.tokens > 35_000
    assert size.tokens * 128 + need * 3 * 128 <= memory
    pool = KVPool(MIXED, size.tokens, torch.device("cpu"), need)
    assert [len(k) for k in pool.k] == [size.tokens + 1, need + 1, need + 1, need + 1]


def test_where_memory_is_short_all_layers_have_the_same_cells() -> None:
    config = KVConfig(memory_share=1.0)
    assert pool_size(config, MIXED, 300 * MIXED.bytes_per_token, 300) == PoolSize(300)
    assert pool_size(KVConfig(pool_tokens=300), MIXED, 1 << 30, 301) == PoolSize(300)


def test_a_pool_of_windows_alone_counts_more_tokens_than_it_has_cells() -> None:
    shape = KVShape(MIXED.layers[1:], torch.float32)
    size = pool_size(KVConfig(memory_share=1.0), shape, 1000 * shape.bytes_per_token, 100)
    assert size == PoolSize(LONGEST * 1000, 1000)


def test_the_plan_tells_what_each_kind_costs() -> None:
    kinds = MIXED.kinds(1000, 100)
    assert [(k.kind, k.layers, k.tokens, k.window) for k in kinds] == [("full", 1, 1000, 0), ("window", 3, 100, 8)]
    assert sum(k.bytes for k in kinds) == 1000 * 128 + 100 * 3 * 128
    assert [k.kind for k in MIXED.kinds(1000, None)] == ["full"]
    chunks = CacheSpec(1, 16, 16, window=8, chunked=True)
    assert [(k.kind, k.window) for k in KVShape((chunks, chunks), torch.float32).kinds(1000, 100)] == [("chunk", 8)]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [([(8, True), (0, False)], (8, True)), ([(8, True), (6, False)], (8, False)), ([(8, True), (6, True)], (8, False))],
)
def test_a_pool_of_chunks_needs_layers_that_agree(kinds: list[tuple[int, bool]], expected: tuple[int, bool]) -> None:
    """Otherwise it is one of windows that cover what any of them sees."""
    shape = KVShape(tuple(CacheSpec(1, 16, 16, *kind) for kind in kinds), torch.float32)
    assert (shape.window, shape.chunked) == expected
    assert [k.kind for k in KVShape((CacheSpec(1, 576, 0),), torch.bfloat16).kinds(9, None)] == ["latent"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str)
def test_the_pool_has_the_bytes_it_says(dtype: torch.dtype) -> None:
    shape = KVShape((CacheSpec(2, 8, 8),) * 2 + (CacheSpec(3, 10, 0),), dtype)
    pool = KVPool(shape, 50, torch.device("cpu"))
    tensors = []
    for cells in (*pool.k, *pool.v):
        tensors += [cells.data, cells.scale] if isinstance(cells, QuantizedCells) else [cells]
    assert sum(t.nbytes for t in tensors) == (50 + 1) * shape.bytes_per_token, "and the cell that is nobody's"
    assert pool.k[1].shape == (51, 2, 8) and pool.k[2].shape == (51, 3, 10)


def test_cells_that_come_next_have_their_memory_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "AHEAD_BYTES", 16 << 20)
    shape = KVShape((CacheSpec(1, 512, 512),) * 2, torch.float32)
    pool = KVPool(shape, 10_000, torch.device("cpu"))
    ready = (16 << 20) // shape.bytes_per_token
    parts = (*pool.k, *pool.v)
    before = [_backed(cells[2 * ready :]) for cells in parts]  # an allocator may give what it had before
    if not pool.prepare(0) or not _backed(pool.k[0][:64]):
        pytest.skip("this system gives no memory ahead")
    calls = 1
    while pool.prepare(0):
        calls += 1
    assert 8 <= calls <= 12, "pieces of 2 MiB, equally many of each tensor"
    assert all(_backed(cells[:ready]) for cells in parts)
    assert [_backed(cells[2 * ready :]) for cells in parts] == before
    while pool.prepare(10_000):
        calls += 1
    assert all(_backed(cells) for cells in parts) and not pool.prepare(10_000)


def test_memory_keeps_up_with_cells_that_come_into_use(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(kv_pool, "AHEAD_BYTES", 16 << 20)
    monkeypatch.setattr(kv_pool, "populate", lambda part: asked.append(len(part)))
    shape = KVShape((CacheSpec(1, 512, 512),) * 2, torch.float32)  # 1,024 cells take 2 MiB in each of 4 tensors
    pool = KVPool(shape, 10_000, torch.device("cpu"))
    while pool.prepare(100):
        pass
    piece = asked[0]
    lead = piece * len(asked) // 4 - 100
    assert 1000 < piece <= 1024 and 2048 <= lead < 4096
    for used in range(100, 9000, 100):
        before = len(asked)
        pool.keep_up(used)
        assert len(asked) - before <= (used > 100 + lead - piece), "what was prepared comes first; never much at a time"
        assert piece * (len(asked) // 4) >= used, "all tensors have memory there"
    nothing = KVPool(KVShape((), torch.float32), 10_000, torch.device("cpu"))
    nothing.keep_up(100)
    assert not nothing.prepare(100), "a model that keeps nothing"
    fresh = KVPool(shape, 10_000, torch.device("cpu"))
    asked.clear()
    fresh.keep_up(400)
    assert len(asked) == kv_pool.MOST_PIECES, "nothing was ready yet"


def _backed(cells: torch.Tensor) -> bool:
    """Whether all pages of ``cells`` are in memory."""
    start, end = cells.data_ptr() // PAGESIZE * PAGESIZE, cells.data_ptr() + cells.nbytes
    found = (ctypes.c_ubyte * -(-(end - start) // PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(end - start), found) == 0
    return all(bytes(found))


def test_the_largest_step_is_measured_and_its_memory_left(tiny_llama: Any) -> None:
    class Counting(PagedAttention):
        def plan(self, batch: AttentionBatch) -> None:
            planned.append(len(batch.positions))
            assert batch.host is not None
            assert batch.host.seq_len.tolist() == [64, 64, 64], "where the keys have the most parts"
            super().plan(batch)

    def tokens(taken: int) -> int:
        def peak(run: Callable[[], object]) -> int:
            run()
            return taken

        source = open_checkpoint(folder)
        context = LayerContext(source, ops, scheme, Counting(ops), dtype, device)
        sizes = WorkerSizes(n_ids=97, context_length=64, n_rows=3, step_tokens=150)
        built = build_worker(source.config, context, sizes, KVConfig(memory_share=0.5), lambda: 1 << 20, peak)
        source.close()
        return built.pool_tokens

    folder, _ = tiny_llama()
    ops, scheme, _, dtype, device = device_parts("reference", torch.float32)
    planned: list[int] = []
    assert tokens(1 << 19) == tokens(0) // 2 > 0
    assert planned == [150, 150]


def test_a_length_whose_tables_do_not_fit_is_refused_before_they_are_made(tiny_llama: Any) -> None:
    folder, _ = tiny_llama()
    ops, scheme, attention, dtype, device = device_parts("reference", torch.float32)
    source = open_checkpoint(folder)
    context = LayerContext(source, ops, scheme, attention, dtype, device)
    sizes = WorkerSizes(n_ids=97, context_length=1 << 40, n_rows=3)
    with pytest.raises(ConfigError, match="smaller context length"):
        build_worker({**source.config, "max_position_embeddings": 1 << 40}, context, sizes, KVConfig(), lambda: 1 << 30)
    source.close()
