"""Weights rounded to 8 or 4 bits, and packed: the specification of :meth:`bough.device.ops.registry.Ops.quantise`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.device.ops.hadamard import BLOCK, transform
from bough.device.ops.packed import GROUP, Kind, PackedWeight, pack_groups, pack_int8, pack_rotated, pad_inputs

Tensor = torch.Tensor

ROWS = 128
"""Outputs that are rounded at a time: what is held beside the weight stays small."""

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the range of a group that are tried: cutting the extremes off leaves finer steps for the rest."""


def quantise(kind: Kind, weight: Tensor) -> PackedWeight:
    """A weight [N, K] rounded to ``kind``, which is one of

    * INT8: one symmetric scale per output, the largest magnitude at 127.
    * ROTATED: the same of the Hadamard transform of the weight.
    * Q8: the same for each 32 inputs, as in GGUF's Q8_0.
    * Q4_MIN: a scale and a minimum for each 32 inputs, those of least squared error among a few shares of the range;
      NaN for inputs that no scale of float16 reaches.
    """
    if kind == Kind.INT8:
        return pack_int8(*_whole_rows(weight, torch.Tensor.float))
    if kind == Kind.ROTATED:
        return pack_rotated(*_whole_rows(weight, _rotated), weight.shape[1])
    n_groups = -(-weight.shape[1] // GROUP)
    q = torch.empty(len(weight), n_groups * GROUP, dtype=torch.uint8, device=weight.device)
    pair = (2,) if kind == Kind.Q4_MIN else ()
    scales = torch.empty(len(weight), n_groups, *pair, dtype=torch.float16, device=weight.device)
    round_groups = _four_bits if kind == Kind.Q4_MIN else _eight_bits
    for first in range(0, len(weight), ROWS):
        wide = pad_inputs(weight[first : first + ROWS].float(), GROUP).view(-1, n_groups, GROUP)
        values, scales[first : first + ROWS] = round_groups(wide)
        q[first : first + ROWS] = values.flatten(1)
    return pack_groups(kind, q[:, : weight.shape[1]], scales)


def _rotated(weight: Tensor) -> Tensor:
    return transform(weight.float() * (1 / BLOCK))


def _whole_rows(weight: Tensor, made: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What is ``made`` of the weight, rounded: uint8 [N, inputs] and float32 scales [N]."""
    values, scales = [], []
    for first in range(0, len(weight), ROWS):
        wide = made(weight[first : first + ROWS])
        scale = wide.abs().amax(1) / 127
        scales.append(scale)
        values.append(_rounded(wide, scale[:, None]))
    return torch.cat(values), torch.cat(scales)


def _eight_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, G, 32] -> uint8 [N, G, 32] and float16 scales [N, G]."""
    scale = (wide.abs().amax(2) / 127).half()
    return _rounded(wide, scale.float()[..., None]), scale


def _rounded(wide: Tensor, scale: Tensor) -> Tensor:
    """``128 + wide / scale`` to the nearest; 128 where the scale is 0."""
    return (wide / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127).add(128).to(torch.uint8)


def _four_bits(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, G, 32] -> uint8 [N, G, 32] in 0 .. 15 and float16 [N, G, 2], scale and minimum."""
    low, high = wide.amin(2, keepdim=True), wide.amax(2, keepdim=True)
    centre, reach = (high + low) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    values, scales = torch.zeros_like(wide, dtype=torch.uint8), wide.new_full((*wide.shape[:2], 2), torch.nan).half()
    for shrink in SHRINKS:
        scale, minimum = (reach * (2 * shrink / 15)).half().float(), (centre - reach * shrink).half().float()
        q = ((wide - minimum) / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, 15)
        error = _sum_of_halves((q * scale + minimum - wide).square())
        better = error < best
        best = torch.where(better, error, best)
        values = torch.where(better, q.to(torch.uint8), values)
        scales = torch.where(better, torch.cat((scale, minimum), 2).half(), scales)
    return values, scales


def _sum_of_halves(x: Tensor) -> Tensor:
    """[N, G, 32] -> [N, G, 1], in an order that vectors can follow."""
    while x.shape[2] > 1:
        half = x.shape[2] // 2
        x = x[..., :half] + x[..., half:]
    return x
