"""Attention by FlashInfer (Ye et al. 2025), for those who have it installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from bough.base.errors import ConfigError
from bough.device.attention.base import AttentionBatch
from bough.device.attention.triton import TritonAttention
from bough.device.attention.work import HostBatch
from bough.device.ops.cells import Cells, QuantizedCells
from bough.device.ops.heads import Scoring
from bough.device.ops.registry import Ops
from bough.device.ops.triton.launch import resident
from bough.device.platform.copies import Passed, to_device

Tensor = torch.Tensor

WORKSPACE = 128 << 20
"""Bytes that its kernels keep partial results in, at least: what its documentation recommends."""

TILE = 4 * 128 * (128 + 1)
"""Bytes of partial results that a program leaves for one query head at most, their sums included."""

DIMS = (64, 128, 256)
"""Of heads, in half precision: what its kernels are made for."""

Plan = tuple[int, int, int, torch.dtype, torch.dtype, float, int, float]


class FlashInferAttention(TritonAttention):
    """:class:`bough.device.attention.base.AttentionBackend`: pages of one cell, planned on the host.

    What it does not know is left to Triton's kernels: heads of other sizes than DIMS, float32, sinks, chunks, latents,
    cells with scales, prefixes that rows share, and captured steps, whose work has to lie at addresses that stay.
    """

    def __init__(self, ops: Ops) -> None:
        """Raises ConfigError where FlashInfer is not installed."""
        if find_spec("flashinfer") is None:
            raise ConfigError("FlashInfer is not installed: pip install 'bough[flashinfer]'", param="attention")
        super().__init__(ops)
        self.name = "flashinfer"
        self._workspace: Tensor | None = None
        self._wrappers: dict[Plan, Any] = {}
        self._copied: dict[Plan, Passed] = {}
        self._planned: set[Plan] = set()
        self._indices: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._planned.clear()
        self._indices = {}

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        host = self.batch.host
        if (
            self._room is not None or host is None or host.shared or scoring.sinks is not None or scoring.chunked
            or q.shape[2] not in DIMS or q.dtype == torch.float32
            or k_cache is v_cache or isinstance(k_cache, QuantizedCells) or isinstance(v_cache, QuantizedCells)
        ):  # fmt: skip
            return super().forward(q, k_cache, v_cache, scoring)
        wrapper = self._wrapper(q, k_cache, scoring, host)
        out: Tensor = wrapper.run(q, (k_cache[:, None], v_cache[:, None]))
        return out

    def _wrapper(self, q: Tensor, cells: Tensor, scoring: Scoring, host: HostBatch) -> Any:
        """The one for layers like this, planned for the step when the first of them asks."""
        plan = (
            q.shape[1], cells.shape[1], q.shape[2], q.dtype, cells.dtype, scoring.scale, scoring.window, scoring.softcap
        )  # fmt: skip
        if plan not in self._wrappers:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            # Keys are split among two programs for each multiprocessor, each with the query heads of one of keys.
            needed = max(WORKSPACE, resident(q.device) // 2 * (q.shape[1] // cells.shape[1]) * TILE)
            if self._workspace is None or len(self._workspace) < needed:
                self._workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
            self._wrappers[plan] = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        if plan not in self._planned:
            self._planned.add(plan)
            q_start, kv_start, locs, last = self._step(host, scoring.window)
            # It writes its plan over the last one, in pinned memory, which the device may be yet to read: that of the
            # step before, whose first layer comes behind it. The device has the other layers to do meanwhile.
            if plan in self._copied:
                self._copied[plan].wait()
            self._wrappers[plan].plan(
                q_start, kv_start, locs, last, plan[0], plan[1], plan[2], 1,
                causal=True, sm_scale=scoring.scale, window_left=scoring.window - 1 if scoring.window else -1,
                logits_soft_cap=scoring.softcap or None, q_data_type=q.dtype, kv_data_type=cells.dtype,
            )  # fmt: skip
            self._copied[plan] = Passed(q.device)
        return self._wrappers[plan]

    def _step(self, host: HostBatch, window: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where the queries and the cells of each row begin, the cells, and that each page holds one; the cells are on
        the device, which is not asked for them. Those of a layer with a window begin where the first new token's
        window does: before it there may be none."""
        if window not in self._indices:
            start = host.seq_len - np.diff(host.q_start)
            begin = np.maximum(0, start - window + 1) if window else np.zeros_like(start)
            lengths = host.seq_len - begin
            kv_start = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
            position = np.arange(kv_start[-1]) - np.repeat(kv_start[:-1] - begin, lengths)
            at = np.stack((np.repeat(host.rows, lengths), position)).astype(np.int32)
            rows, positions = to_device(at, self.batch.rows.device)
            locs = self.batch.locs(window)[0][rows, positions]
            ones = torch.ones(len(lengths), dtype=torch.int32)
            self._indices[window] = torch.from_numpy(host.q_start), torch.from_numpy(kv_start), locs, ones
        return self._indices[window]
