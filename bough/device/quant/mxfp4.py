"""MXFP4 (Open Compute Project 2023): 4-bit floats, 32 inputs of which share a power of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.device.ops.packed import DOUBLED_FP4, ZERO, Kind, PackedWeight, pack_groups

Tensor = torch.Tensor

GROUP = 32
"""Inputs that share an exponent."""


@dataclass(frozen=True, slots=True)
class MxFp4:
    """A :class:`bough.device.quant.base.Parameter` [N, K] that is in memory.

    Attributes:
        codes: uint8 [N, G, 16], two codes per byte: input 2i of a group in the low half of byte i, 2i + 1 in the high.
        exponents: uint8 [N, G], of two, plus 127.
        dtype: of the model.
    """

    codes: Tensor
    exponents: Tensor
    dtype: torch.dtype

    def _codes(self) -> Tensor:
        """uint8 [N, G, 32]."""
        return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)

    def dense(self) -> Tensor:
        """[N, K] in the model's dtype."""
        return (_doubled(self._codes()) * _scale(self.exponents)[..., None]).flatten(1).to(self.dtype)

    def blocks(self) -> PackedWeight | None:
        """As :func:`pack_floats` gives it."""
        return pack_floats(self._codes(), self.exponents)


def pack_floats(codes: Tensor, exponents: Tensor) -> PackedWeight | None:
    """The same values as integers of 8 bits; None where a scale is no number of 16 bits.

    ``codes`` are uint8 [N, G, 32], one a byte; ``exponents`` uint8 [N, G].
    """
    doubled = _doubled(codes)
    # Of groups of zeros the exponent means nothing.
    scale = _scale(exponents) * doubled.any(-1)
    if not torch.equal(scale.half().float(), scale):
        return None
    q = (doubled.int() + ZERO[Kind.Q8]).to(torch.uint8)
    return pack_groups(Kind.Q8, q.flatten(1), scale.half(), group=GROUP)


def _doubled(codes: Tensor) -> Tensor:
    """int8, of the shape of ``codes``: twice the values, before they are scaled."""
    return torch.tensor(DOUBLED_FP4, dtype=torch.int8, device=codes.device)[codes.int()]


def _scale(exponents: Tensor) -> Tensor:
    """float32, for doubled values: the exponents are those of float32."""
    return (exponents.int() << 23).view(torch.float32) / 2
