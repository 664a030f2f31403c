"""How packed weights are handed to kernels that multiply with them themselves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from bough.device.ops.compact import CompactWeight
from bough.device.ops.library import LinearParts, PackedLinear
from bough.device.ops.packed import PANEL, PackedWeight


def describe(
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    compact: CompactWeight | None = None,
    exponents: torch.Tensor | None = None,
) -> PackedLinear:
    """The weight as the kernels know it, with its compact form and what :func:`bough.device.ops.fixed.exponents` gives,
    without which it cannot be multiplied where they are read; it does not keep the tensors alive."""
    scale, sub, words = weight.scale, weight.sub, None
    if compact is not None:
        scale, sub, words = compact.table, compact.strays, compact.words
    pointers = [None if t is None else t.data_ptr() for t in (weight.weight, scale, sub, bias, words, exponents)]
    return PackedLinear(*pointers, weight.n_in, weight.n_out, weight.kind, weight.group)


def linear_parts(linear: Sequence[PackedLinear]) -> LinearParts:
    """The parts as kernels take them; it does not keep them alive."""
    addresses = [ctypes.addressof(part) for part in linear]
    return LinearParts((ctypes.c_void_p * LinearParts.MOST)(*addresses), len(addresses))


def takeable(linear: Sequence[PackedLinear]) -> bool:
    """Whether kernels can take a linear layer of these parts."""
    return 1 <= len(linear) <= LinearParts.MOST


def pairable(gate_up: Sequence[PackedLinear], inner_size: int) -> bool:
    """Whether kernels can pair gates with values: they do it by panels, so in one weight the values begin with one."""
    return len(gate_up) == 2 or inner_size % PANEL == 0
