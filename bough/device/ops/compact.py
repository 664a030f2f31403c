"""bfloat16 weights once more, in three quarters of the bytes and without loss.

Products with few rows take as long as memory takes to bring the weight. Nearly all exponents of a weight are among 16
neighbours (DFloat11, Zhang et al. 2025; ZipNN, Hershcovitch et al. 2024), or those of zeros: 4 bits name one, and a
value takes 12. The few others are listed. The layout is that of ``PackedLinear.compact`` in csrc/common.h. Products
with more rows read the whole form, which is kept: the bits of a result are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bough.device.ops.library import CompactCall, Library
from bough.device.ops.packed import PANEL, Kind, PackedWeight, from_panels
from bough.device.ops.pages import CHUNK, Arena, advise_huge_pages

Tensor = torch.Tensor

READERS = ("avx512", "avx512vnni", "avx512bf16", "avx512bf16x2")
"""Instruction sets whose kernels read it."""

INPUTS = 8
"""Inputs of a unit, of which a weight has whole ones."""

STRAY_BYTES = 8


@dataclass(frozen=True, slots=True)
class CompactWeight:
    """The compact form of a weight [n_out, n_in] in P panels.

    Attributes:
        words: int32 [P, n_in / 8, 3, 16].
        table: int16 [P, 32], the upper 9 bits that codes stand for; the upper 16 codes are those of negative values.
        strays: uint8 [P, n_in / 16 + 2, 8], values that have no code.
    """

    words: Tensor
    table: Tensor
    strays: Tensor


class Compactor:
    """Makes compact forms in an arena.

    Attributes:
        n_bytes: that they have taken.
    """

    def __init__(self, library: Library, spare: Callable[[], int] | None) -> None:
        """``spare``: bytes that all of them may take, asked before each; None: any."""
        self._library, self._spare, self._arena = library, spare, Arena()
        self.n_bytes = 0

    def __call__(self, weight: PackedWeight) -> CompactWeight | None:
        """None where no kernel reads it, too many values have no code, or the bytes do not suffice."""
        n_panels, n_in = len(weight.weight), weight.n_in
        if weight.kind != Kind.BF16 or n_in % INPUTS or self._library.isa() not in READERS:
            return None
        n_bytes = weight.weight.nbytes * 3 // 4
        if self._spare is not None and self.n_bytes + n_bytes > self._spare():
            return None
        like, in_arena = weight.weight.new_empty(0, n_in // INPUTS, 3, PANEL), n_bytes < CHUNK
        if in_arena:
            words = self._arena.room(n_panels, like)
        else:  # by itself: what is left of the small ones' chunk is not given up for it
            words = like.new_empty(n_panels, *like.shape[1:])
            advise_huge_pages(words)
        table = torch.empty(n_panels, 2 * PANEL, dtype=torch.int16)
        strays = torch.empty(n_panels, n_in // 16 + 2, STRAY_BYTES, dtype=torch.uint8)
        too_many = ctypes.c_int(0)
        call = CompactCall(
            weight.weight.data_ptr(), words.data_ptr(), table.data_ptr(), strays.data_ptr(),
            ctypes.addressof(too_many), weight.n_out, n_in, torch.get_num_threads(),
        )  # fmt: skip
        self._library.function("compact")(ctypes.byref(call))
        if too_many.value:
            if in_arena:
                self._arena.take_back()
            return None
        self.n_bytes += n_bytes
        return CompactWeight(words, table, strays)


def expand(compact: CompactWeight, n_out: int) -> Tensor:
    """The values [n_out, n_in] bfloat16 again. The slow twin of the kernels' reading."""
    lines = compact.words.view(torch.int16).int() & 0xFFFF  # [P, units, 3, 32]
    last = (lines[:, :, 0] >> 12) | (lines[:, :, 1] >> 12 << 4) | (lines[:, :, 2] >> 12 << 8)
    held = torch.cat((lines & 0xFFF, last[:, :, None]), dim=2)  # [P, units, 4, 32]
    upper = compact.table.int() & 0xFFFF
    codes = (held >> 7).long()
    values = (held & 0x7F) | upper[:, None, None].expand(*codes.shape[:3], -1).gather(3, codes)
    for panel, strays in enumerate(compact.strays):
        for stray in strays:
            unit = int(stray[:4].view(torch.int32))
            if unit < 0:
                break
            values[panel, unit, int(stray[4]), int(stray[5])] = int(stray[6:].view(torch.int16)) & 0xFFFF
    pairs = values.to(torch.int16).view(torch.int32).view(len(values), -1, PANEL)
    return from_panels(pairs, n_out).contiguous().view(torch.bfloat16)
