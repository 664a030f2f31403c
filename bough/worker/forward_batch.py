"""The device tensors of one plan.

Shapes: B rows in the plan, T new tokens, S rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import LAST, SharedPrefix, StepPlan
from bough.device.attention.base import AttentionBatch
from bough.device.ops.groups import SharedGroups
from bough.worker.device_rows import DeviceRows

Tensor = torch.Tensor


@dataclass(slots=True)
class ForwardBatch:
    """Everything that a forward reads, on the device unless said otherwise.

    Attributes:
        tokens: [T] int32 ids.
        attention: positions, locs and lengths.
        sampled: [S] plan indices of the rows that sample (host).
        sample_at: [S] int32 index among the T tokens of the position that each of them samples from.
        host_q_start: [B + 1] ``q_start`` (host).
        adapters: [B] the place of each row's adapter, or NO_ADAPTER (host).
    """

    tokens: Tensor
    attention: AttentionBatch
    sampled: NDArray[np.intp]
    sample_at: Tensor
    host_q_start: NDArray[np.int32]
    adapters: NDArray[np.int32]

    @classmethod
    def from_plan(cls, plan: StepPlan, rows: DeviceRows) -> ForwardBatch:
        """Build the tensors and enter the new locs into the page table.

        Tokens that the plan leaves to the device (``LAST``) come from ``rows.last_token``, so plans must be
        turned into batches in their order, each after the sampling of the one before it.
        """
        q_start = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.n_new, out=q_start[1:])
        positions = np.arange(q_start[-1], dtype=np.int32) - np.repeat(q_start[:-1] - plan.start, plan.n_new)
        sampled = np.flatnonzero(plan.sample)
        # One copy to the device: on a small model's step every further one counts.
        host = (
            plan.rows, q_start, plan.start + plan.n_new, positions, plan.out_loc, np.repeat(plan.rows, plan.n_new),
            q_start[1:][sampled] - 1,
        )  # fmt: skip
        whole = _to(np.concatenate(host), rows)
        b_rows, starts, seq_len, at, out_loc, row_of, sample_at = torch.split(whole, [len(part) for part in host])
        attention = AttentionBatch(
            page_table=rows.page_table,
            rows=b_rows,
            q_start=starts,
            seq_len=seq_len,
            positions=at,
            out_loc=out_loc,
            groups=_groups(plan.shared, rows),
        )
        rows.page_table[row_of, at] = out_loc
        return cls(_tokens(plan, row_of, rows), attention, sampled, sample_at, q_start, rows.adapter[plan.rows])


def _groups(shared: tuple[SharedPrefix, ...], rows: DeviceRows) -> SharedGroups | None:
    if not shared:
        return None
    start = np.cumsum([0, *(len(prefix.rows) for prefix in shared)])
    members = np.concatenate([prefix.rows for prefix in shared])
    tokens = np.array([prefix.n_tokens for prefix in shared])
    return SharedGroups(_to(start, rows), _to(members, rows), _to(tokens, rows))


def _tokens(plan: StepPlan, row_of: Tensor, rows: DeviceRows) -> Tensor:
    unknown = np.flatnonzero(plan.tokens == LAST)
    if len(unknown) == len(plan.tokens):
        return rows.last_token[row_of]
    tokens = _to(plan.tokens, rows)
    if len(unknown):
        at = torch.from_numpy(unknown).to(rows.device)
        tokens[at] = rows.last_token[row_of[at]]
    return tokens


def _to(values: NDArray[np.integer], rows: DeviceRows) -> Tensor:
    """An int32 copy on the device: plans are read-only and may be shared with other ranks."""
    return torch.tensor(np.asarray(values, np.int32), device=rows.device)
