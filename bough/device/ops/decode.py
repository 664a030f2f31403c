"""A step in which each of a few rows computes one token and samples: kernels called one behind the other.

The weights that go through the caches leave nothing of Python in them, so that whatever runs first behind a kernel
takes several times as long as in a loop. Here that is so once per step: embedding, layers, head and the likeliest ids
follow each other at once, over memory that is made, and described to them, once for each number of rows.
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
from bough.device.ops.library import PackedLinear, StackCall
from bough.device.ops.packed import PackedWeight
from bough.device.ops.parts import describe
from bough.device.ops.stack import LayerStack

Tensor = torch.Tensor

MOST_ROWS = 16
"""With more rows the kernels take so long that what is between them does not count, and logits much memory."""

BF16 = 1
"""The code of the one dtype that stacks compute in."""


class Decoded(NamedTuple):
    """What a step of B rows comes to, valid until the next one of as many: last hidden states [B, D], logits [B, V],
    and the ids [B] int64 of the largest, -1 where they are not numbers, as tensor and as array."""

    hidden: Tensor
    logits: Tensor
    best: Tensor
    ids: NDArray[np.int64]


@dataclass(slots=True)
class _Prepared:
    """A step over one batch, whose tensors are written anew for each step."""

    tokens: Tensor
    batch: AttentionBatch
    caches: Sequence[Cells]
    embedded: Tensor
    result: Decoded
    addresses: tuple[int, ...]
    call: StackCall
    call_at: int
    room: Sequence[Tensor]


class DecodeSteps:
    """Steps of a model whose layers are stacked, its embedding and head packed. Not shared between threads."""

    def __init__(self, stack: LayerStack, table: PackedWeight, head: PackedLinear) -> None:
        """``table`` is [V, D], of which ``head`` may be a part."""
        library = stack.library
        self._rows, self._linear = library.function("packed_rows"), library.function("packed_linear")
        self._layers, self._argmax = library.function("layer_stack"), library.function("argmax")
        self._stack, self._weight, self._head = stack, table, head
        self._table, self._vocab = describe(table), head.n_out
        self._table_at, self._head_at = ctypes.addressof(self._table), ctypes.addressof(head)
        self._prepared: dict[int, _Prepared] = {}

    def __call__(self, tokens: Tensor, batch: AttentionBatch, k: Sequence[Cells], v: Sequence[Cells]) -> Decoded | None:
        """``tokens`` [B] int32, one of each row of ``batch`` -> what they come to; writes their KV to the caches ``k``
        and ``v`` [N, KH, D] of every layer. None for too many rows."""
        n, threads = tokens.shape[0], torch.get_num_threads()
        if n > MOST_ROWS:
            return None
        self._stack.use(k, v)
        step = self._prepared.get(n)
        if step is None or not self._is_of(step, tokens, batch, k):
            step = self._prepared[n] = self._prepare(tokens, batch, k)
        ids, embedded, hidden, logits, best = step.addresses
        self._stack.share(step.call, batch.groups, threads)
        self._rows(BF16, self._table_at, ids, n, embedded, threads)
        self._layers(step.call_at)
        self._linear(BF16, self._head_at, hidden, logits, self._vocab, n, threads)
        self._argmax(BF16, logits, best, n, self._vocab, threads)
        return step.result

    def _is_of(self, step: _Prepared, tokens: Tensor, batch: AttentionBatch, k: Sequence[Cells]) -> bool:
        return step.tokens is tokens and step.batch is batch and step.caches is k and step.room is self._stack.room

    def _prepare(self, tokens: Tensor, batch: AttentionBatch, k: Sequence[Cells]) -> _Prepared:
        n, size = len(tokens), self._weight.n_in
        embedded, hidden = torch.empty(2, n, size, dtype=torch.bfloat16)
        logits = torch.empty(n, self._head.n_out, dtype=torch.bfloat16)
        call = self._stack.described(embedded, hidden, batch)
        best = torch.empty(n, dtype=torch.int64)
        addresses = tuple(tensor.data_ptr() for tensor in (tokens, embedded, hidden, logits, best))
        result = Decoded(hidden, logits, best, best.numpy())
        return _Prepared(tokens, batch, k, embedded, result, addresses, call, ctypes.addressof(call), self._stack.room)
