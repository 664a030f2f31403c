"""Low-rank updates in captured steps, where which token has which adapter is known to the device alone.

The weights of each adapter stay where they are; a table of their addresses, which a captured step reads, is all that
changes when one is loaded (as in Punica, Chen et al. 2023, and S-LoRA, Sheng et al. 2023). Steps that are not captured
are computed run by run, as products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from bough.device.ops.lora import DenseLora, Update
from bough.device.ops.triton.launch import check, check_floats

Tensor = torch.Tensor

RANKS = 16
"""Inner values that a program computes together."""

INPUTS = 256
"""Inputs that it holds at a time."""

OUTPUTS = 64
"""Outputs of one token that a program computes."""

MOST = 256
"""The largest rank."""

ENTRY = 3
"""Numbers of the table for a part of an adapter: the addresses of a and b, and the rank; 0 where there is none."""


@triton.jit
def shrink_kernel(
    x, places, table, inner, n_in, n_parts, most, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token).to(tl.int64)
    if place >= 0:
        entry = table + (place * n_parts + part) * 3
        a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
        rank = tl.load(entry + 2).to(tl.int32)
        for first in range(0, rank, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            total = tl.zeros((BLOCK_R,), tl.float32)
            for begin in range(0, n_in, BLOCK_K):
                k = begin + tl.arange(0, BLOCK_K)
                values = tl.load(x + token * n_in + k, mask=k < n_in, other=0.0).to(tl.float32)
                weights = tl.load(
                    a + r[:, None] * n_in + k[None, :], mask=(r < rank)[:, None] & (k < n_in)[None, :], other=0.0
                )
                total += tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
            tl.store(inner + (token * n_parts + part) * most + r, total, mask=r < rank)


@triton.jit
def expand_kernel(
    inner, places, table, starts, out, n_out, n_parts, most, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places + token).to(tl.int64)
    begin = tl.load(starts + part)
    n = tl.load(starts + part + 1) - begin
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (place >= 0) & (tl.program_id(2) * BLOCK_N < n):
        entry = table + (place * n_parts + part) * 3
        rank = tl.load(entry + 2).to(tl.int32)
        if rank > 0:
            b = tl.load(entry + 1).to(tl.pointer_type(out.dtype.element_ty))
            r = tl.arange(0, BLOCK_R)
            known = columns < n
            values = tl.load(inner + (token * n_parts + part) * most + r, mask=r < rank, other=0.0)
            weights = tl.load(
                b + columns[:, None].to(tl.int64) * rank + r[None, :], mask=known[:, None] & (r < rank)[None, :],
                other=0.0,
            )  # fmt: skip
            added = tl.sum(weights.to(tl.float32) * values[None, :], axis=1)
            at = out + token * n_out + begin + columns
            before = tl.load(at, mask=known, other=0.0).to(tl.float32)
            tl.store(at, (before + added).to(out.dtype.element_ty), mask=known)


class TritonLora(DenseLora):
    """:class:`bough.device.ops.lora.LoraOp` and :class:`bough.device.ops.lora.CapturedLora`."""

    def __init__(
        self, linear: Callable[[Tensor, None], Callable[[Tensor], Tensor]], sizes: Sequence[int], n_places: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        """As :class:`DenseLora`, for so many places on ``device``."""
        super().__init__(linear, sizes, dtype)
        self._device, self._largest = device, max(sizes)
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._starts = torch.tensor(ends, dtype=torch.int32, device=device)
        self._table = torch.zeros((n_places, len(sizes), ENTRY), dtype=torch.int64, device=device)
        self._kept: dict[int, Update] = {}

    def set(self, place: int, update: Update | None) -> None:
        entries = torch.zeros(self._table.shape[1:], dtype=torch.int64)
        if update is not None:
            update = Update([self._moved(a) for a in update.a], [self._moved(b) for b in update.b])
            for part, (a, b) in enumerate(zip(update.a, update.b)):
                if a is not None and b is not None:
                    entries[part] = torch.tensor([a.data_ptr(), b.data_ptr(), len(a)])
            self._kept[place] = update
        with torch.inference_mode():
            self._table[place] = entries.to(self._device)
        super().set(place, update)
        if update is None:
            self._kept.pop(place, None)

    def add(self, places: Tensor, x: Tensor, out: Tensor) -> None:
        check_floats("lora", x, out)
        (n, n_in), n_parts = x.shape, self._table.shape[1]
        check(len(places) == len(out) == n and x.dtype == self._dtype, "lora", x, out, places)
        inner = x.new_empty((n, n_parts, MOST), dtype=torch.float32)
        shrink_kernel[(n, n_parts)](
            x, places, self._table, inner, n_in, n_parts, MOST, BLOCK_R=RANKS, BLOCK_K=INPUTS, num_warps=4
        )
        expand_kernel[(n, n_parts, triton.cdiv(self._largest, OUTPUTS))](
            inner, places, self._table, self._starts, out, out.shape[1], n_parts, MOST, BLOCK_N=OUTPUTS,
            BLOCK_R=MOST, num_warps=4,
        )  # fmt: skip

    def _moved(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.to(self._device, self._dtype).contiguous()
