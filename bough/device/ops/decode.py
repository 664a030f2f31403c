"""A step in which each of a few rows computes one token and samples, in one call.

The weights that go through the caches leave nothing of Python in them, so that whatever runs first behind a kernel
takes several times as long as in a loop. Here that is so once per step: embedding, layers, head and the likeliest ids
follow each other, over memory that is made, and described to them, once for each number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bough.device.attention.base import AttentionBatch
from bough.device.ops.cells import Cells
from bough.device.ops.groups import SharedGroups
from bough.device.ops.library import DecodeCall, PackedLinear, StackCall
from bough.device.ops.packed import PackedWeight
from bough.device.ops.parts import describe
from bough.device.ops.stack import LayerStack

Tensor = torch.Tensor

MOST_ROWS = 16
"""With more rows the kernels take so long that what is between them does not count, and logits much memory."""


class Decoded(NamedTuple):
    """What a step of B rows comes to, valid until the next one of as many: last hidden states [B, D], logits [B, V],
    the ids [B] of the largest, -1 where they are not numbers: int64 as tensor, int32 as array, and whether there are
    none of these."""

    hidden: Tensor
    logits: Tensor
    best: Tensor
    ids: NDArray[np.int32]
    sure: bool


@dataclass(slots=True)
class _Prepared:
    """A step over one batch, whose tensors are written anew for each step."""

    tokens: Tensor
    last: Tensor
    batch: AttentionBatch
    caches: Sequence[Cells]
    embedded: Tensor
    results: tuple[Decoded, Decoded]
    call: DecodeCall
    call_at: int
    stack: StackCall
    room: Sequence[Tensor]
    groups: SharedGroups | None = None
    threads: int = 0


class DecodeSteps:
    """Steps of a model whose layers are stacked, its embedding and head packed. Not shared between threads."""

    def __init__(self, stack: LayerStack, table: PackedWeight, head: PackedLinear) -> None:
        """``table`` is [V, D], of which ``head`` may be a part."""
        self._function = stack.library.function("decode")
        self._stack, self._weight, self._head, self._table = stack, table, head, describe(table)
        self._prepared: dict[int, _Prepared] = {}

    def __call__(
        self, tokens: Tensor, last: Tensor, batch: AttentionBatch, k: Sequence[Cells], v: Sequence[Cells]
    ) -> Decoded | None:
        """``tokens`` [B] int32, one of each row of ``batch`` -> what they come to; writes their KV to the caches ``k``
        and ``v`` [N, KH, D] of every layer, and the likeliest ids to the rows of ``last`` [n_rows] int32, which is the
        same wherever ``batch`` is. None for too many rows."""
        n = tokens.shape[0]
        if n > MOST_ROWS:
            return None
        self._stack.use(k, v)
        step = self._prepared.get(n)
        if step is None or not self._is_of(step, tokens, batch, k):
            step = self._prepared[n] = self._prepare(tokens, last, batch, k)
        threads = torch.get_num_threads()
        if step.groups is not batch.groups or step.threads != threads:
            self._stack.share(step.stack, batch.groups, threads)
            step.groups, step.threads = batch.groups, threads
        return step.results[self._function(step.call_at)]

    def _is_of(self, step: _Prepared, tokens: Tensor, batch: AttentionBatch, k: Sequence[Cells]) -> bool:
        return step.tokens is tokens and step.batch is batch and step.caches is k and step.room is self._stack.room

    def _prepare(self, tokens: Tensor, last: Tensor, batch: AttentionBatch, k: Sequence[Cells]) -> _Prepared:
        n, size = len(tokens), self._weight.n_in
        embedded, hidden = torch.empty(2, n, size, dtype=torch.bfloat16)
        logits = torch.empty(n, self._head.n_out, dtype=torch.bfloat16)
        best, ids = torch.empty(n, dtype=torch.int64), torch.empty(n, dtype=torch.int32)
        call = DecodeCall(
            self._stack.described(embedded, hidden, batch), ctypes.addressof(self._table), ctypes.addressof(self._head),
            *(tensor.data_ptr() for tensor in (tokens, logits, best, ids, last)),
        )  # fmt: skip
        found = Decoded(hidden, logits, best, ids.numpy(), True)
        results, at, room = (found._replace(sure=False), found), ctypes.addressof(call), self._stack.room
        return _Prepared(tokens, last, batch, k, embedded, results, call, at, call.stack, room)
