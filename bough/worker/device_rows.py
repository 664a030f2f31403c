"""What the device keeps per row, whatever the request asks for: where its KV lies and its last token."""

from __future__ import annotations

import numpy as np
import torch

from bough.base.plan import NO_ADAPTER, Ints, RowInit

Tensor = torch.Tensor


class DeviceRows:
    """The page table and the last token of each row. Only plans and the sampler write here.

    A row that the host has already ended may still be in one later plan (overlap): it reads and writes its own
    cells and its own entries here, and its results are dropped by the host.

    Attributes:
        page_table: [n_rows, max_len] int32, position -> loc. Entries past a row's length are stale.
        last_token: [n_rows] int32, the token that the row sampled last; a valid id always.
        adapter: [n_rows] the place of the row's adapter, or NO_ADAPTER (host).
    """

    def __init__(self, n_rows: int, max_len: int, device: torch.device) -> None:
        """``max_len`` is the longest sequence plus the one token that overlap may compute too many."""
        self.device = device
        self.page_table = torch.zeros((n_rows, max_len), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(n_rows, dtype=torch.int32, device=device)
        self.adapter: Ints = np.full(n_rows, NO_ADAPTER, np.int32)

    def add(self, init: RowInit) -> None:
        """Take in a row with the KV that it shares from the start."""
        n_cached = len(init.prefix_locs)
        if n_cached:
            self.page_table[init.row, :n_cached] = torch.tensor(init.prefix_locs, device=self.device)
        self.last_token[init.row] = int(init.ids[-1])
        self.adapter[init.row] = init.adapter

    def set_last(self, rows: list[int], tokens: Ints) -> None:
        """Note what ``rows`` sampled."""
        self.last_token[torch.tensor(rows, dtype=torch.int64, device=self.device)] = torch.from_numpy(tokens).to(
            self.device
        )
