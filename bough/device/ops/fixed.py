"""bfloat16 as whole numbers (block floating point), for processors that add up products of 16-bit integers faster than
those of floats, and have no bfloat16: AVX2, AVX-VNNI, and AVX-512 with VNNI but without BF16.

64 inputs of a row share a power of two, and so do 64 weights of an output: see csrc/fixed.h, where the arithmetic is.
Weights stay what they are in memory; only the powers are found when they are loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from bough.device.ops.library import ExponentsCall, Library
from bough.device.ops.packed import PANEL, Kind, PackedWeight

Tensor = torch.Tensor

READERS = ("avx2", "avxvnni", "avx512vnni")
"""Instruction sets whose kernels multiply bfloat16 weights so."""

INPUTS = 64
"""Of a group, and weights of an output."""

BITS = 13
MOST_SUM = 2.0 ** (31 - BITS) - INPUTS
MOST_EXPONENT = 120


def exponents(library: Library, weight: PackedWeight) -> Tensor | None:
    """uint8 [P, groups, 16], of each group of a panel's weights: ``exponents`` of ``PackedLinear`` in csrc/common.h.
    None where the kernels do not read them."""
    if weight.kind != Kind.BF16 or library.isa() not in READERS:
        return None
    n_in = weight.n_in
    found = torch.empty(len(weight.weight), -(-n_in // INPUTS), PANEL, dtype=torch.uint8)
    call = ExponentsCall(weight.weight.data_ptr(), found.data_ptr(), weight.n_out, n_in, torch.get_num_threads())
    library.function("exponents")(ctypes.byref(call))
    return found


def fixed_inputs(x: Tensor) -> Tensor:
    """x [T, K] as they are multiplied, float32: rounded to bfloat16, and then in groups. The slow twin."""
    return _fixed(x, torch.inf, torch.round)


def fixed_weights(weight: Tensor, isa: str) -> Tensor:
    """The same of a weight [N, K], by the kernels of an instruction set."""
    return _fixed(weight, MOST_SUM, _away_from_zero if isa == "avx512vnni" else torch.round)


def _away_from_zero(x: Tensor) -> Tensor:
    """To the nearest whole number, of two that are as near to the larger one."""
    return (x.abs() + 0.5).floor() * x.sign()


def _fixed(x: Tensor, most_sum: float, whole: Callable[[Tensor], Tensor]) -> Tensor:
    n, k = x.shape
    groups = torch.nn.functional.pad(x.bfloat16().float(), (0, -k % INPUTS)).view(n, -1, INPUTS)
    top = groups.abs().amax(-1, keepdim=True)
    exponent = (BITS - torch.frexp(top).exponent).clamp(max=MOST_EXPONENT)
    scaled = torch.ldexp(groups, exponent)
    exponent = exponent - (scaled.abs().sum(-1, keepdim=True) > most_sum).int()
    fixed = torch.ldexp(whole(torch.ldexp(groups, exponent)), -exponent)
    return fixed.where(top.isfinite(), torch.nan).view(n, -1)[:, :k]
