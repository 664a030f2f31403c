"""The seam between a forward and the way its rows attend to the paged KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from bough.device.attention.work import HostBatch
from bough.device.ops.cells import Cells
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring

Tensor = torch.Tensor


class WindowLocs(NamedTuple):
    """``page_table`` and ``out_loc`` of layers that see a window and have cells of their own."""

    page_table: Tensor
    out_loc: Tensor


@dataclass(slots=True)
class AttentionBatch:
    """What attention needs to know of one step; all tensors int32 and on the device.

    Attributes:
        page_table: [n_rows, max_len] loc of each position of each row, this step's included.
        rows: [B] row of each sequence.
        q_start: [B + 1] where the new tokens of each sequence begin among the T of the step.
        seq_len: [B] length of each sequence with its new tokens.
        positions: [T] position of each new token.
        out_loc: [T] loc that receives its KV.
        groups: sequences with equal leading locs, if there are any.
        host: the same on the host, for backends that plan there; None: they have to ask the device.
        window: where the KV of layers that see a window lies; None: where that of the others does.
        ends: [S] the new tokens whose hidden states anybody wants, rising; those of the others may be left undefined.
            None: all of them.
    """

    page_table: Tensor
    rows: Tensor
    q_start: Tensor
    seq_len: Tensor
    positions: Tensor
    out_loc: Tensor
    groups: SharedGroups | None = None
    host: HostBatch | None = None
    window: WindowLocs | None = None
    ends: Tensor | None = None

    def locs(self, window: int) -> tuple[Tensor, Tensor]:
        """``page_table`` and ``out_loc`` of layers with this window, 0 for none."""
        return self.window if window and self.window is not None else (self.page_table, self.out_loc)


class Planned:
    """What every backend keeps of the step that it is planned for.

    Attributes:
        batch: what was planned; RuntimeError before the first plan.
    """

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None

    @property
    def batch(self) -> AttentionBatch:
        if self._batch is None:
            raise RuntimeError("forward before plan")
        return self._batch

    def plan(self, batch: AttentionBatch) -> None:
        """See :class:`AttentionBackend`."""
        self._batch = batch


class AttentionBackend(Protocol):
    """Planned once per step, then called once per layer. One per worker; not shared between threads.

    Attributes:
        name: what people call it.
        batch: what was planned; RuntimeError before the first plan.
    """

    name: str

    @property
    def batch(self) -> AttentionBatch: ...

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for a step. Whatever does not depend on the layer is worked out here."""
        ...

    def write(
        self, qkv: Tensor, cos_sin: Tensor, k_cache: Cells, v_cache: Cells, heads: Heads, window: int = 0
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to the step's cells; the queries [T, H, D].

        qkv: [T, (H + 2 KH) * D]; cos_sin: [n_positions, R] float32; the caches [N, KH, D] of one layer, and its window.
        """
        ...

    def forward(self, q: Tensor, k_cache: Cells, v_cache: Cells, scoring: Scoring) -> Tensor:
        """Causal attention of all new tokens, [T, H, D], after ``write`` for all of them."""
        ...
