"""One plan as arrays of the host, and as the tensors of a forward.

Shapes: B rows in the plan, T new tokens, S rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import LAST, NO_ADAPTER, Ints, SharedPrefix, StepPlan
from bough.device.attention.base import AttentionBatch, WindowLocs
from bough.device.attention.work import HostBatch
from bough.device.ops.groups import SharedGroups
from bough.device.platform.copies import to_device
from bough.worker.device_rows import DeviceRows

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class HostStep:
    """What a forward is told about a plan, in one array: one copy to the device, where every further one counts.

    Attributes:
        array: int32, the parts one after the other.
        lengths: of the parts: rows, q_start, seq_len [B], positions, out_loc, row of each token, tokens [T], for the
            rows that sample, sample_at and row [S], and window_loc [T] or nothing.
        attention: rows, starts and lengths once more.
        sampled: [S] plan indices of the rows that sample.
    """

    array: Ints
    lengths: tuple[int, ...]
    attention: HostBatch
    sampled: NDArray[np.intp]

    @classmethod
    def from_plan(cls, plan: StepPlan) -> HostStep:
        q_start = np.zeros(len(plan.rows) + 1, np.int32)
        np.cumsum(plan.n_new, out=q_start[1:])
        positions = np.arange(q_start[-1], dtype=np.int32) - np.repeat(q_start[:-1] - plan.start, plan.n_new)
        sampled = np.flatnonzero(plan.sample)
        seq_len = plan.start + plan.n_new
        parts = (
            plan.rows, q_start, seq_len, positions, plan.out_loc, np.repeat(plan.rows, plan.n_new), plan.tokens,
            q_start[1:][sampled] - 1, plan.rows[sampled], *([] if plan.window_loc is None else [plan.window_loc]),
        )  # fmt: skip
        host = HostBatch(plan.rows, q_start, seq_len, plan.shared)
        return cls(
            np.concatenate(parts).astype(np.int32, copy=False), tuple(len(part) for part in parts), host, sampled
        )


@dataclass(slots=True)
class ForwardBatch:
    """Everything that a forward reads, on the device unless said otherwise.

    Attributes:
        tokens: [T] int32 ids.
        attention: positions, locs and lengths.
        sampled: [S] plan indices of the rows that sample (host).
        sample_at: [S] int32 index among the T tokens of the position that each of them samples from.
        sample_rows: [S] int32 the rows themselves.
        host_q_start: [B + 1] ``q_start`` (host).
        adapters: [B] the place of each row's adapter, or NO_ADAPTER (host).
        places: [B] int32 the same on the device, in a step that is captured for rows with adapters.
    """

    tokens: Tensor
    attention: AttentionBatch
    sampled: NDArray[np.intp]
    sample_at: Tensor
    sample_rows: Tensor
    host_q_start: NDArray[np.int32]
    adapters: NDArray[np.int32]
    places: Tensor | None = None

    @classmethod
    def from_plan(cls, plan: StepPlan, rows: DeviceRows, whole: bool = True) -> ForwardBatch:
        """Build the tensors and enter the new locs into the page table. ``whole``: hidden states of tokens that nobody
        samples from are wanted, too.

        Tokens that the plan leaves to the device (``LAST``) come from ``rows.last_token``, so plans must be
        turned into batches in their order, each after the sampling of the one before it was launched.
        """
        groups = _groups(plan.shared, rows)
        step = HostStep.from_plan(plan)
        if rows.host_table is not None:
            batch = cls.on_host(step, rows, groups)
            # A few tokens of many are worth a region of their own, where the last layer is computed for them alone.
            if not whole and 2 * len(batch.sampled) <= len(plan.tokens):
                batch.attention.ends = batch.sample_at
            return batch
        return cls.of(step, to_device(step.array, rows.device), rows, groups)

    @classmethod
    def on_host(cls, step: HostStep, rows: DeviceRows, groups: SharedGroups | None = None) -> ForwardBatch:
        """As :meth:`of` where the host is the device, in numpy and without copies.

        No core computes before this is done, and torch's dispatch takes longer than what it dispatches here.
        """
        table, last = rows.host_table, rows.host_last
        assert table is not None and last is not None
        ends = accumulate(step.lengths)
        parts = [step.array[end - length : end] for length, end in zip(step.lengths, ends)]
        _, _, _, at, out_loc, row_of, given, _, _, *windowed = parts
        table[row_of, at] = out_loc
        if windowed and rows.window_table is not None:
            rows.window_table.numpy()[row_of, at] = windowed[0]
        tokens = np.where(given < 0, last[row_of], given)
        return cls._of_parts(step, [torch.from_numpy(part) for part in parts], torch.from_numpy(tokens), rows, groups)

    @classmethod
    def of_decodes(cls, plan: StepPlan, rows: DeviceRows) -> ForwardBatch | None:
        """As :meth:`from_plan` where the host is the device and each row computes one token and samples: little is to
        be told. None elsewhere.

        The weights have just gone through the caches and left nothing of Python in them: what is called here takes
        several times as long as it does in a loop. So one batch serves all steps of as many rows.
        """
        n, table, last = len(plan.rows), rows.host_table, rows.host_last
        if table is None or last is None or len(plan.tokens) != n or plan.window_loc is not None:
            return None
        if False in plan.sample.tolist():
            return None
        room = rows.decodes.get(n)
        if room is None:
            room = rows.decodes[n] = _DecodeRoom.of(n, rows)
        batch, parts = room
        at = plan.rows.astype(np.intp)
        parts[0] = plan.rows
        parts[1] = plan.start
        parts[2] = plan.out_loc
        np.add(plan.start, plan.n_new, out=parts[3])
        parts[4] = np.where(plan.tokens < 0, last[at], plan.tokens) if LAST in plan.tokens.tolist() else plan.tokens
        table.reshape(-1)[at * table.shape[1] + plan.start] = plan.out_loc
        attention = batch.attention
        attention.groups = _groups(plan.shared, rows)
        attention.host = HostBatch(plan.rows, batch.host_q_start, parts[3], plan.shared)
        batch.adapters = rows.adapter[at]
        return batch

    @classmethod
    def of(cls, step: HostStep, whole: Tensor, rows: DeviceRows, groups: SharedGroups | None = None) -> ForwardBatch:
        """The same from ``whole``, the array of ``step`` on the device. Nothing here looks at a number of it."""
        parts = torch.split(whole[: sum(step.lengths)], list(step.lengths))
        _, _, _, at, out_loc, row_of, given, _, _, *windowed = parts
        rows.page_table[row_of, at] = out_loc
        if windowed and rows.window_table is not None:
            rows.window_table[row_of, at] = windowed[0]
        tokens = torch.where(given < 0, rows.last_token[row_of], given)
        return cls._of_parts(step, parts, tokens, rows, groups)

    @classmethod
    def _of_parts(
        cls, step: HostStep, parts: Sequence[Tensor], tokens: Tensor, rows: DeviceRows, groups: SharedGroups | None
    ) -> ForwardBatch:
        """``parts`` are those of ``step``, on the device."""
        b_rows, starts, seq_len, at, out_loc, _, _, sample_at, sample_rows, *windowed = parts
        window = None
        if windowed and rows.window_table is not None:
            window = WindowLocs(rows.window_table, windowed[0])
        attention = AttentionBatch(
            page_table=rows.page_table,
            rows=b_rows,
            q_start=starts,
            seq_len=seq_len,
            positions=at,
            out_loc=out_loc,
            groups=groups,
            host=step.attention,
            window=window,
        )
        host = step.attention
        return cls(tokens, attention, step.sampled, sample_at, sample_rows, host.q_start, rows.adapter[host.rows])


class _DecodeRoom(NamedTuple):
    """The batch of all steps in which so many rows compute one token each, and its numbers [5, B]: rows, positions,
    locs, lengths and tokens."""

    batch: ForwardBatch
    parts: Ints

    @classmethod
    def of(cls, n: int, rows: DeviceRows) -> _DecodeRoom:
        parts = np.zeros((5, n), np.int32)
        b_rows, at, out_loc, lengths, tokens = torch.from_numpy(parts).unbind()
        starts = rows.counting[: n + 1]
        attention = AttentionBatch(rows.page_table, b_rows, starts, lengths, at, out_loc)
        batch = ForwardBatch(
            tokens, attention, np.arange(n), starts[:n], b_rows, starts.numpy(), np.full(n, NO_ADAPTER, np.int32)
        )
        return cls(batch, parts)


def _groups(shared: tuple[SharedPrefix, ...], rows: DeviceRows) -> SharedGroups | None:
    if not shared:
        return None
    if rows.groups is not None and rows.groups[0] is shared:
        return rows.groups[1]
    start = np.cumsum([0, *(len(prefix.rows) for prefix in shared)])
    members = np.concatenate([prefix.rows for prefix in shared])
    tokens = np.array([prefix.n_tokens for prefix in shared])
    groups = SharedGroups(*(to_device(part.astype(np.int32), rows.device) for part in (start, members, tokens)))
    rows.groups = shared, groups
    return groups
