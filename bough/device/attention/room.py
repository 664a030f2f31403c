"""Where the work of attention lies for a step that is captured: at addresses that stay."""

from __future__ import annotations

from typing import Protocol

import torch

from bough.device.attention.base import AttentionBackend, AttentionBatch
from bough.device.attention.work import HostBatch, Sizes, Tiles, most_work, plan_work
from bough.device.platform.copies import fill

Tensor = torch.Tensor

Key = tuple[Tiles, int, bool]
"""What work depends on besides the step: the tiles of the heads, the window, and whether that is chunked.
Layers that agree share it."""


class Room:
    """Memory for the work of any step in which ``n_rows`` rows compute one token each, at addresses that stay."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self._device = device
        self._sizes, self._length = most_work(n_rows)
        self._arrays: dict[Key, Tensor] = {}
        self._host: HostBatch | None = None

    def fill(self, host: HostBatch) -> None:
        """Plan ``host`` for every key that was asked for so far, and copy the work over what was there."""
        self._host = host
        for key, array in self._arrays.items():
            fill(array, plan_work(host, *key).array)

    def work(self, key: Key) -> tuple[Tensor, Sizes]:
        """The array of ``key``, and bounds of what it may hold; made, and filled, when it is first asked for."""
        if key not in self._arrays:
            assert self._host is not None
            self._arrays[key] = torch.zeros(self._length, dtype=torch.int32, device=self._device)
            fill(self._arrays[key], plan_work(self._host, *key).array)
        return self._arrays[key], self._sizes


class CapturedAttention(AttentionBackend, Protocol):
    """A backend whose steps of decodes can be captured in graphs."""

    def plan_in(self, room: Room, batch: AttentionBatch) -> None:
        """Plan a step whose work lies, or will lie, in ``room``: nothing is copied where it was planned before."""
        ...
