"""Block formats of ggml: their sizes, and their decoding to float32.

A quantised row is a sequence of blocks of 32 (``Q4_0`` ... ``Q8_0``) or 256 values (the K formats). Each
block holds half-precision scales and small integers; the layouts are those of ggml's ``block_*``
structures. Decoding is vectorised over blocks, and :func:`decode_into` works through a tensor in pieces,
so that no float32 copy of a whole tensor ever exists.

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


def _column(blocks: Blocks, field: str) -> Floats:
    """A per-block scale as float32 [n, 1]."""
    scale: Floats = blocks[field].astype(np.float32)[:, None]
    return scale


def _nibbles(packed: Blocks) -> Blocks:
    """uint8 [n, k] -> [n, 2k]: all low halves, then all high halves."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _with_fifth_bit(blocks: Blocks) -> Blocks:
    """Five-bit values [n, 32] of a Q5 block: nibbles in ``q``, the top bits in the 32-bit word ``high``."""
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    five: Blocks = _nibbles(blocks["q"]) | (high << 4)
    return five


def _plain(blocks: Blocks) -> Floats:
    return blocks["q"].astype(np.float32)


def _bf16(blocks: Blocks) -> Floats:
    return (blocks["q"].astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: Blocks) -> Floats:
    values: Floats = (_nibbles(blocks["q"]).view(np.int8) - np.int8(8)) * _column(blocks, "d")
    return values


def _q4_1(blocks: Blocks) -> Floats:
    values: Floats = _nibbles(blocks["q"]) * _column(blocks, "d")
    values += _column(blocks, "m")
    return values


def _q5_0(blocks: Blocks) -> Floats:
    values: Floats = (_with_fifth_bit(blocks).view(np.int8) - np.int8(16)) * _column(blocks, "d")
    return values


def _q5_1(blocks: Blocks) -> Floats:
    values: Floats = _with_fifth_bit(blocks) * _column(blocks, "d")
    values += _column(blocks, "m")
    return values


def _q8_0(blocks: Blocks) -> Floats:
    values: Floats = blocks["q"] * _column(blocks, "d")
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
    scale = (scales * _column(blocks, "d"))[:, :, None]
    minimum = (minima * _column(blocks, "dmin"))[:, :, None]
    values: Floats = q * scale
    values -= minimum
    return values.reshape(len(q), 256)


def _q4_k(blocks: Blocks) -> Floats:
    # Four runs of 32 bytes; each gives 32 low halves, then 32 high halves.
    return _k_affine(blocks, _nibbles(blocks["q"].reshape(-1, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Blocks) -> Floats:
    low = _nibbles(blocks["q"].reshape(-1, 32)).reshape(-1, 8, 32)
    # Bit g of byte i is the top bit of value i of group g.
    high = np.unpackbits(blocks["high"][:, None, :], axis=1, bitorder="little")
    return _k_affine(blocks, low | (high << 4))


def _q6_k(blocks: Blocks) -> Floats:
    n = len(blocks)
    # Two halves of 128 values: 64 bytes of nibbles and 32 bytes that hold four 2-bit tops each.
    low = _nibbles(blocks["low"].reshape(-1, 64)).reshape(n, 2, 4, 32)
    high = blocks["high"].reshape(n, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    q = (low | (high << 4)).view(np.int8) - np.int8(32)
    scale = blocks["scales"] * _column(blocks, "d")
    values: Floats = q.reshape(n, 16, 16) * scale[:, :, None]
    return values.reshape(n, 256)


def _format(
    name: str, values: int, decode: Callable[[Blocks], Floats], *fields: tuple[str, str] | tuple[str, str, int]
) -> BlockFormat:
    return BlockFormat(name, values, np.dtype(list(fields)), decode)


#: ggml's type number -> format, for every type that can be loaded.
FORMATS: dict[int, BlockFormat] = {
    0: _format("F32", 1, _plain, ("q", "<f4")),
    1: _format("F16", 1, _plain, ("q", "<f2")),
    2: _format("Q4_0", 32, _q4_0, ("d", "<f2"), ("q", "u1", 16)),
    3: _format("Q4_1", 32, _q4_1, ("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)),
    6: _format("Q5_0", 32, _q5_0, ("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
    7: _format("Q5_1", 32, _q5_1, ("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)),
    8: _format("Q8_0", 32, _q8_0, ("d", "<f2"), ("q", "i1", 32)),
    12: _format("Q4_K", 256, _q4_k, ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("q", "u1", 128)),
    13: _format(
        "Q5_K", 256, _q5_k, ("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("high", "u1", 32), ("q", "u1", 128)
    ),
    14: _format("Q6_K", 256, _q6_k, ("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")),
    30: _format("BF16", 1, _bf16, ("q", "<u2")),
}

#: Types that exist but cannot be loaded, for messages.
OTHER_TYPES: dict[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


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
