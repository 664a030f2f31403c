"""Block formats of ggml: their sizes, and their decoding to float32.

A quantised row is a sequence of blocks of 32 (``Q4_0`` ... ``Q8_0``) or 256 values (the K formats). Each
block holds half-precision scales and small integers; the layouts are those of ggml's ``block_*``
structures (:mod:`bough.weights.formats` lists them). Decoding is vectorised over blocks, and :func:`decode_into` works
through a tensor in pieces, so that no float32 copy of a whole tensor ever exists.

Shapes: n is a number of blocks, e the values in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float32]
# Structured blocks, or the integers unpacked from them.
Blocks = npt.NDArray[Any]

# Values decoded at a time: few enough that the float32 piece stays within a core's cache and that torch converts it
# on the calling thread. Waking the others for each piece costs more than it saves, and seconds on a busy machine.
PIECE = 1 << 15


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One ggml tensor type.

    Attributes:
        name: ggml's name of it.
        values: values in a block (e).
        layout: numpy structure of one block; its ``itemsize`` is the block's size in bytes.
        decode: blocks of ``layout`` [n] -> float32 [n, e].
    """

    name: str
    values: int
    layout: np.dtype[Any]
    decode: Callable[[Blocks], Floats]

    def nbytes(self, values: int) -> int:
        """Bytes that ``values`` values take; ValueError if they are not whole blocks."""
        blocks, rest = divmod(values, self.values)
        if rest:
            raise ValueError(f"{values} values are not whole {self.name} blocks of {self.values}")
        return blocks * self.layout.itemsize


def column(blocks: Blocks, field: str) -> Floats:
    """A per-block scale as float32 [n, 1]."""
    scale: Floats = blocks[field].astype(np.float32)[:, None]
    return scale


def nibbles(packed: Blocks) -> Blocks:
    """uint8 [n, k] -> [n, 2k]: all low halves, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _with_fifth_bit(blocks: Blocks) -> Blocks:
    """Five-bit values [n, 32] of a Q5 block: nibbles in ``q``, the top bits in the 32-bit word ``high``."""
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    five: Blocks = nibbles(blocks["q"]) | (high << 4)
    return five


def plain(blocks: Blocks) -> Floats:
    return blocks["q"].astype(np.float32)


def bf16(blocks: Blocks) -> Floats:
    return (blocks["q"].astype(np.uint32) << 16).view(np.float32)


def q1_0(blocks: Blocks) -> Floats:
    signs = np.unpackbits(blocks["q"], axis=1, bitorder="little")
    values: Floats = (signs * np.float32(2) - np.float32(1)) * column(blocks, "d")
    return values


def q4_0(blocks: Blocks) -> Floats:
    values: Floats = (nibbles(blocks["q"]).view(np.int8) - np.int8(8)) * column(blocks, "d")
    return values


def q4_1(blocks: Blocks) -> Floats:
    values: Floats = nibbles(blocks["q"]) * column(blocks, "d")
    values += column(blocks, "m")
    return values


def q5_0(blocks: Blocks) -> Floats:
    values: Floats = (_with_fifth_bit(blocks).view(np.int8) - np.int8(16)) * column(blocks, "d")
    return values


def q5_1(blocks: Blocks) -> Floats:
    values: Floats = _with_fifth_bit(blocks) * column(blocks, "d")
    values += column(blocks, "m")
    return values


def q8_0(blocks: Blocks) -> Floats:
    values: Floats = blocks["q"] * column(blocks, "d")
    return values


def _k_scales(packed: Blocks) -> tuple[Blocks, Blocks]:
    """The eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block, each [n, 8].

    The first four of either kind are the low six bits of bytes 0-3 and 4-7. Of the last four, bytes 8-11 hold
    the low four bits (scale in the low half, minimum in the high half), and the top two bits of bytes
    0-3 and 4-7 are their high two.
    """
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=1)
    return scales, minima


def _k_affine(blocks: Blocks, q: Blocks) -> Floats:
    """``d * scale * q - dmin * minimum`` for integers q [n, 8, 32]; result [n, 256]."""
    scales, minima = _k_scales(blocks["scales"])
    scale = (scales * column(blocks, "d"))[:, :, None]
    minimum = (minima * column(blocks, "dmin"))[:, :, None]
    values: Floats = q * scale
    values -= minimum
    return values.reshape(len(q), 256)


def q2_k(blocks: Blocks) -> Floats:
    # Two runs of 32 bytes; each gives 128 values, by the pairs of bits of its bytes.
    q = blocks["q"].reshape(-1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = blocks["scales"]
    values: Floats = q.reshape(len(blocks), 16, 16) * ((scales & 15) * column(blocks, "d"))[:, :, None]
    values -= ((scales >> 4) * column(blocks, "dmin"))[:, :, None]
    return values.reshape(len(blocks), 256)


def q3_k(blocks: Blocks) -> Floats:
    n = len(blocks)
    low = blocks["q"].reshape(-1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    # Bit g of byte i is the top bit of value i of group g; without it a value is four less.
    top = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")
    q = (low.reshape(n, 8, 32) | top << 2).view(np.int8) - np.int8(4)
    # Of sixteen 6-bit scales the low halves of eight bytes, the high ones, then four bytes with four 2-bit tops each.
    packed = blocks["scales"]
    tops = packed[:, None, 8:] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (nibbles(packed[:, :8]) | tops.reshape(n, 16) << 4).view(np.int8) - np.int8(32)
    values: Floats = q.reshape(n, 16, 16) * (scales * column(blocks, "d"))[:, :, None]
    return values.reshape(n, 256)


def q4_k(blocks: Blocks) -> Floats:
    # Four runs of 32 bytes; each gives 32 low halves, then 32 high halves.
    return _k_affine(blocks, nibbles(blocks["q"].reshape(-1, 32)).reshape(-1, 8, 32))


def q5_k(blocks: Blocks) -> Floats:
    low = nibbles(blocks["q"].reshape(-1, 32)).reshape(-1, 8, 32)
    # Bit g of byte i is the top bit of value i of group g.
    high = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")
    return _k_affine(blocks, low | (high << 4))


def q6_k(blocks: Blocks) -> Floats:
    n = len(blocks)
    # Two halves of 128 values: 64 bytes of nibbles and 32 bytes that hold four 2-bit tops each.
    low = nibbles(blocks["low"].reshape(-1, 64)).reshape(n, 2, 4, 32)
    high = blocks["high"].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    q = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale = blocks["scales"] * column(blocks, "d")
    values: Floats = q.reshape(n, 16, 16) * scale[:, :, None]
    return values.reshape(n, 256)


def decode_into(out: torch.Tensor, data: npt.NDArray[np.uint8], fmt: BlockFormat) -> None:
    """Decode ``data`` (uint8 [bytes], whole blocks) into ``out``, a contiguous tensor of as many values.

    ``out`` may be of any floating dtype: values are decoded to float32 and rounded once.
    """
    import torch  # slow, and not needed by those who only read the sizes of blocks

    blocks = data.view(fmt.layout)
    flat = out.view(-1)
    step = max(1, PIECE // fmt.values)
    # Infinite and undefined scales of a damaged file decode to what they are; they are no reason to warn.
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(blocks), step):
            values = fmt.decode(blocks[first : first + step]).reshape(-1)
            start = first * fmt.values
            flat[start : start + values.size].copy_(torch.from_numpy(values))
