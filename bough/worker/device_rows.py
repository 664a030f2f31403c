"""What the device keeps per row, whatever the request asks for: where its KV lies and its last token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from bough.base.plan import NO_ADAPTER, Ints, RowInit, SharedPrefix
from bough.device.platform.copies import Timer, to_device

if TYPE_CHECKING:
    from bough.device.ops.groups import SharedGroups
    from bough.worker.forward_batch import ForwardBatch

Tensor = torch.Tensor


class DeviceRows:
    """The page table and the last token of each row. Only plans and the sampler write here.

    A row that the host has already ended may still be in one later plan (overlap): it reads and writes its own
    cells and its own entries here, and its results are dropped by the host.

    Attributes:
        page_table: [n_rows + 1, max_len] int32, position -> loc. Entries past a row's length are stale. The last row is
            nobody's: what fills up a batch to a size that the device is prepared for.
        window_table: the same for layers that see a window; None where they have no pool of their own.
        last_token: [n_rows + 1] int32, the token that the row sampled last; a valid id always.
        counting: [n_rows + 2] int32, 0, 1, 2, ...
        decodes: by the number of rows, what :class:`bough.worker.forward_batch.ForwardBatch` keeps for such steps.
        groups: the groups that plans told of last, and what became of them: most steps have those of the one before.
        host_table, host_last: page table and last tokens as numpy has them, where the device is the host.
        adapter: [n_rows + 1] the place of the row's adapter, or NO_ADAPTER (host).
    """

    def __init__(self, n_rows: int, max_len: int, device: torch.device, windowed: bool = False) -> None:
        """``max_len`` is the longest sequence plus the one token that overlap may compute too many; ``windowed``:
        layers that see a window have a pool of their own."""
        self.device = device
        self.n_rows = n_rows
        self.page_table = torch.zeros((n_rows + 1, max_len), dtype=torch.int32, device=device)
        self.window_table = torch.zeros_like(self.page_table) if windowed else None
        self.last_token = torch.zeros(n_rows + 1, dtype=torch.int32, device=device)
        self.counting = torch.arange(n_rows + 2, dtype=torch.int32, device=device)
        self.adapter: Ints = np.full(n_rows + 1, NO_ADAPTER, np.int32)
        self.decodes: dict[int, tuple[ForwardBatch, Ints]] = {}
        self.groups: tuple[tuple[SharedPrefix, ...], SharedGroups] | None = None
        self.host_table: Ints | None = self.page_table.numpy() if device.type == "cpu" else None
        self.host_last: Ints | None = self.last_token.numpy() if device.type == "cpu" else None

    def timer(self) -> Timer:
        """Started, of what the device does."""
        return Timer(self.device if self.host_table is None else None)

    def add(self, init: RowInit) -> None:
        """Take in a row with the KV that it shares from the start."""
        n_cached = len(init.prefix_locs)
        if n_cached:
            self.page_table[init.row, :n_cached] = to_device(init.prefix_locs, self.device)
            if self.window_table is not None:
                assert init.window_locs is not None
                self.window_table[init.row, :n_cached] = to_device(init.window_locs, self.device)
        self.last_token[init.row] = int(init.ids[-1])
        self.adapter[init.row] = init.adapter

    def set_last(self, rows: Tensor, tokens: Tensor) -> None:
        """Note what ``rows`` [S] sampled: ``tokens`` [S], negative where that failed."""
        if self.host_last is not None:  # as ForwardBatch.on_host
            self.host_last[rows.numpy()] = np.maximum(tokens.numpy(), 0)
        else:
            self.last_token[rows] = tokens.clamp(min=0).int()
