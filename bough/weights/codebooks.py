"""Decoding of ggml's formats of 1 to 4 bits whose integers index tables (IQ*, MXFP4, NVFP4), or are ternary (TQ*).

Shapes as in :mod:`bough.weights.blocks`; g groups of a block share a scale. Operations come in ggml's order, so that
values agree to the last bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.weights import grids
from bough.weights.blocks import Blocks, Floats, column, nibbles

_SEVEN = np.arange(128, dtype=np.uint8)
_SIGNS = _SEVEN | np.unpackbits(_SEVEN[:, None], axis=1).sum(axis=1, dtype=np.uint8) << 7
"""Seven signs, and an eighth that makes the number of negative ones even, by the index that stands for them."""

_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""What the four bits of IQ4 stand for."""

_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of four-bit floats."""


def _signs(bits: Blocks) -> Floats:
    """uint8 [n, k] -> [n, 8 k]: -1 where a bit is set."""
    return np.float32(1) - 2 * np.unpackbits(bits, axis=1, bitorder="little").astype(np.float32)


def _indexed_signs(words: Blocks) -> Floats:
    """uint32 [n, 8] with four indices of seven bits each -> [n, 256]."""
    return _signs(_SIGNS[_shifted(words, 0, 7, 14, 21) & 127])


def _shifted(fields: Blocks, *shifts: int) -> Blocks:
    """[n, k] -> [n, k * shifts]: each field shifted right by each number."""
    shifted: Blocks = fields[:, :, None] >> np.array(shifts, fields.dtype)
    return shifted.reshape(len(fields), -1)


def _halves(fields: Blocks) -> Blocks:
    """uint8 [n, k] -> [n, 2k]: the two halves of each byte, the low one first."""
    return _shifted(fields, 0, 4) & 15


def _floats(integers: Blocks) -> Floats:
    return integers.astype(np.float32)


def _scaled(values: Floats, scale: Floats) -> Floats:
    """[n, e] by scales [n, g] of groups in order."""
    n = len(values)
    return (values.reshape(n, scale.shape[1], -1) * scale[:, :, None]).reshape(n, -1)


def _looked_up(grid: npt.NDArray[np.float32], index: Blocks) -> Floats:
    """The values [n, e] that the indices [n, k] stand for."""
    return grid[index].reshape(len(index), -1)


def iq2_xxs(blocks: Blocks) -> Floats:
    index = np.ascontiguousarray(blocks["q"][:, :, 0]).view(np.uint8)
    words = blocks["q"][:, :, 1]
    scale = column(blocks, "d") * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    return _scaled(_looked_up(grids.IQ2_XXS, index), scale) * _indexed_signs(words)


def iq2_xs(blocks: Blocks) -> Floats:
    q = blocks["q"]
    scale = column(blocks, "d") * (np.float32(0.5) + _floats(_halves(blocks["scales"]))) * np.float32(0.25)
    return _scaled(_looked_up(grids.IQ2_XS, q & 511), scale) * _signs(_SIGNS[q >> 9])


def iq2_s(blocks: Blocks) -> Floats:
    index = blocks["q"] | (_shifted(blocks["high"], 0, 2, 4, 6) & 3).astype(np.uint16) << 8
    scale = column(blocks, "d") * (np.float32(0.5) + _floats(_halves(blocks["scales"]))) * np.float32(0.25)
    return _scaled(_looked_up(grids.IQ2_S, index), scale) * _signs(blocks["signs"])


def iq3_xxs(blocks: Blocks) -> Floats:
    words = blocks["words"]
    scale = column(blocks, "d") * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _scaled(_looked_up(grids.IQ3_XXS, blocks["q"]), scale) * _indexed_signs(words)


def iq3_s(blocks: Blocks) -> Floats:
    high = np.unpackbits(blocks["high"], axis=1, bitorder="little")
    scale = column(blocks, "d") * (1 + 2 * _floats(_halves(blocks["scales"])))
    return _scaled(_looked_up(grids.IQ3_S, blocks["q"] | high.astype(np.uint16) << 8), scale) * _signs(blocks["signs"])


def iq1_s(blocks: Blocks) -> Floats:
    high = blocks["high"]
    index = blocks["q"] | (_shifted(high, 0, 3, 6, 9) & 7) << 8
    shift = np.where(high & 0x8000, np.float32(-0.125), np.float32(0.125))
    values = _looked_up(grids.IQ1_S, index) + shift.repeat(32, axis=1)
    return _scaled(values, column(blocks, "d") * (2 * _floats(high >> 12 & 7) + 1))


def iq1_m(blocks: Blocks) -> Floats:
    # The four topmost bits of the four words of scales are the block's own scale.
    words = blocks["scales"]
    parts = words >> 12 << np.array([0, 4, 8, 12], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1).view(np.float16).astype(np.float32)[:, None]
    high = _halves(blocks["high"])
    shift = np.where(high & 8, np.float32(-0.125), np.float32(0.125))
    values = _looked_up(grids.IQ1_S, blocks["q"] | (high & 7).astype(np.uint16) << 8) + shift.repeat(8, axis=1)
    return _scaled(values, d * (2 * _floats(_shifted(words, 0, 3, 6, 9) & 7) + 1))


def iq4_nl(blocks: Blocks) -> Floats:
    return _LEVELS[nibbles(blocks["q"])] * column(blocks, "d")


def iq4_xs(blocks: Blocks) -> Floats:
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scale = (_halves(blocks["low"]) | high << 4).astype(np.float32) - 32
    values = _LEVELS[nibbles(blocks["q"].reshape(-1, 16))].reshape(len(blocks), 256)
    return _scaled(values, column(blocks, "d") * scale)


def tq1_0(blocks: Blocks) -> Floats:
    # A byte is the fraction, in 256ths, whose digits in base 3 are five values; of the last four bytes only four.
    def digits(packed: Blocks, width: int, count: int) -> Blocks:
        powers = np.array([3**i for i in range(count)], np.uint8)[:, None]
        return (packed.reshape(len(packed), -1, 1, width) * powers).reshape(len(packed), -1)

    q = blocks["q"]
    found = np.concatenate((digits(q[:, :32], 32, 5), digits(q[:, 32:], 16, 5), digits(blocks["high"], 4, 4)), axis=1)
    return ((found.astype(np.uint16) * 3 >> 8).astype(np.float32) - 1) * column(blocks, "d")


def tq2_0(blocks: Blocks) -> Floats:
    # Two runs of 32 bytes hold the first, second, third and fourth 32 of their 128 values in their pairs of bits.
    runs = blocks["q"].reshape(-1, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    return (runs.reshape(len(blocks), 256).astype(np.float32) - 1) * column(blocks, "d")


def mxfp4(blocks: Blocks) -> Floats:
    # The exponent's half as a float32: its lowest two are not normal numbers.
    e = blocks["e"].astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << e, (e - np.uint32(1)) << np.uint32(23)).astype(np.uint32)
    return _E2M1[nibbles(blocks["q"])] * bits.view(np.float32)[:, None]


def nvfp4(blocks: Blocks) -> Floats:
    # The scale of 16 values is an 8-bit float without a sign, of 4 bits of exponent; its NaN means nothing.
    d = blocks["d"].astype(np.int32)
    exponent, mantissa = d >> 3 & 15, (d & 7).astype(np.float32)
    half = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(1 + mantissa / 8, exponent - 8))
    half[d == 0x7F] = 0
    codes = np.concatenate((blocks["q"] & 15, blocks["q"] >> 4), axis=2)
    return (_E2M1[codes] * half.astype(np.float32)[..., None]).reshape(len(blocks), 64)
