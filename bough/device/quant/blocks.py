"""Weights of GGUF files multiplied as the file holds them: repacked, with the values unchanged.

The layouts are those of ggml's ``block_*`` structures. Formats without a kernel are decoded by the loader instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import Kind, PackedWeight, pack_groups
from bough.device.quant.base import Blocks, Parameter
from bough.device.quant.mxfp4 import pack_floats

Tensor = torch.Tensor
log = logging.getLogger(__name__)


_IQ4_LEVELS = torch.tensor([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8)
"""What the four bits of IQ4_NL stand for, and 128."""


def pack_as_stored(parameter: Parameter) -> PackedWeight | None:
    """What the file holds; None where that is not quantised, or there is no kernel for it."""
    blocks = parameter.blocks()
    if isinstance(blocks, PackedWeight):
        return blocks
    if isinstance(blocks, HeldWeight):
        _tell()
    packer = PACKERS.get(blocks.format) if isinstance(blocks, Blocks) else None
    return packer(blocks) if isinstance(blocks, Blocks) and packer is not None else None


@cache
def _tell() -> None:
    log.info("weights in 8-bit floats are decoded: this device has no product of them")


def _fields(blocks: Blocks, values: int, *sizes: int) -> tuple[Tensor, ...]:
    """The fields of all blocks of ``values`` values: uint8 [N, blocks of a row, size] each."""
    whole = blocks.rows.view(len(blocks.rows), blocks.n_in // values, sum(sizes))
    return tuple(whole[..., end - size : end] for size, end in zip(sizes, accumulate(sizes)))


def _half(field: Tensor) -> Tensor:
    """uint8 [N, B, 2] -> float16 [N, B]."""
    return field.contiguous().view(torch.float16)[..., 0]


def _q4_0(blocks: Blocks) -> PackedWeight:
    d, q = _fields(blocks, 32, 2, 16)
    return pack_groups(Kind.Q4, q, _half(d))


def _q4_1(blocks: Blocks) -> PackedWeight:
    d, q = _fields(blocks, 32, 4, 16)
    return pack_groups(Kind.Q4_MIN, q, d.contiguous().view(torch.float16))


def _q5_0(blocks: Blocks) -> PackedWeight:
    """As bytes: their scales are those of groups of 32, too."""
    d, high, q = _fields(blocks, 32, 2, 4, 16)
    bits = high[..., None] >> torch.arange(8, dtype=torch.uint8, device=high.device) & 1
    values = torch.cat((q & 15, q >> 4), dim=2) | bits.flatten(2) << 4
    return pack_groups(Kind.Q8, (values + (128 - 16)).flatten(1), _half(d))


def _iq4_nl(blocks: Blocks) -> PackedWeight:
    """As bytes: the levels are integers."""
    d, q = _fields(blocks, 32, 2, 16)
    values = _IQ4_LEVELS.to(q.device)[torch.cat((q & 15, q >> 4), dim=2).long()]
    return pack_groups(Kind.Q8, values.flatten(1), _half(d))


def _mxfp4(blocks: Blocks) -> PackedWeight | None:
    exponents, q = _fields(blocks, 32, 1, 16)
    return pack_floats(torch.cat((q & 15, q >> 4), dim=2), exponents[..., 0])


def _q3_k(blocks: Blocks) -> PackedWeight:
    """As Q6_K, whose scales are of groups of 16, too, and have more bits."""
    high, q, packed, d = _fields(blocks, 256, 32, 64, 12, 2)
    runs = q.reshape(*q.shape[:2], 2, 32)
    low = torch.stack([runs >> shift & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2)
    top = torch.cat([high >> bit & 1 for bit in range(8)], dim=2)
    values = (low | top << 2).flatten(1) + (32 - 4)
    tops = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=2)
    scales = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=2) | tops << 4
    return pack_groups(Kind.Q6_K, values, _half(d), (scales - 32).reshape(len(values), -1, 2))


def _q8_0(blocks: Blocks) -> PackedWeight:
    d, q = _fields(blocks, 32, 2, 32)
    return pack_groups(Kind.Q8, (q ^ 128).flatten(1), _half(d))


def _q4_k(blocks: Blocks) -> PackedWeight:
    d, packed, q = _fields(blocks, 256, 4, 12, 128)
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=2)
    sub = torch.stack((scales, minima), dim=3).flatten(1, 2)
    # Runs of 32 bytes hold one group of 32 values in their low halves and the next in their high halves.
    runs = q.reshape(*q.shape[:2], 4, 32)
    values = torch.stack((runs & 15, runs >> 4), dim=3).flatten(1)
    return pack_groups(Kind.Q4_K, values, d.contiguous().view(torch.float16), sub)


def _q6_k(blocks: Blocks) -> PackedWeight:
    low, high, scales, d = _fields(blocks, 256, 128, 64, 16, 2)
    # Two halves of 128 values: 64 bytes with two 4-bit values, 32 bytes with four 2-bit tops.
    runs = low.reshape(*low.shape[:2], 2, 64)
    bottom = torch.cat((runs & 15, runs >> 4), dim=3)
    tops = high.reshape(*high.shape[:2], 2, 32)
    top = torch.cat([tops >> shift & 3 for shift in (0, 2, 4, 6)], dim=3)
    values = (bottom | (top << 4)).flatten(1)
    return pack_groups(Kind.Q6_K, values, _half(d), scales.reshape(len(values), -1, 2))


PACKERS: dict[str, Callable[[Blocks], PackedWeight | None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}
"""ggml's name of a format -> how its blocks become a packed weight; None where the kernels do not hold the values."""
