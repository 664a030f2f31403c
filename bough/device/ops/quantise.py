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

MULTIPLES = 255
"""Scales and minima of groups are so many times what the largest of eight are made of, at most."""


def quantise(kind: Kind, weight: Tensor) -> PackedWeight:
    """A weight [N, K] rounded to ``kind``, which is one of

    * INT8: one symmetric scale per output, the largest magnitude at 127.
    * ROTATED: the same of the Hadamard transform of the weight.
    * Q8: the same for each 32 inputs, as in GGUF's Q8_0.
    * Q4_K: a scale and a minimum of 8 bits for each 32 inputs, those of least squared error among a few shares of the
      range, zero included; NaN for 256 inputs some of which no scale reaches.
    """
    if kind == Kind.INT8:
        return pack_int8(*_whole_rows(weight, torch.Tensor.float))
    if kind == Kind.ROTATED:
        return pack_rotated(*_whole_rows(weight, _rotated), weight.shape[1])
    n_out, n_in = weight.shape
    n_groups, n_supers = -(-n_in // GROUP), -(-n_in // 256)
    four = kind == Kind.Q4_K
    q = weight.new_empty(n_out, n_groups * GROUP, dtype=torch.uint8)
    scale = weight.new_empty((n_out, n_supers, 2) if four else (n_out, n_groups), dtype=torch.float16)
    multiples = weight.new_empty(n_out, n_groups, 2, dtype=torch.uint8) if four else None
    for first in range(0, n_out, ROWS):
        some = slice(first, first + ROWS)
        rows = pad_inputs(weight[some].float(), 256 if four else GROUP)
        wide = rows.view(len(rows), -1, GROUP)
        if multiples is None:
            values, scale[some] = _eight_bits(wide)
        else:
            values, scale[some], found = _four_bits(wide)
            multiples[some] = found[:, :n_groups]
        q[some] = values.flatten(1)[:, : n_groups * GROUP]
    return pack_groups(kind, q[:, :n_in], scale, multiples)


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


def _four_bits(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [N, 8 S, 32] -> uint8 [N, 8 S, 32] in 0 .. 15, float16 [N, S, 2], what scales and minima are multiples
    of, and uint8 [N, 8 S, 2], how many of it each is."""
    low, high = wide.amin(2, keepdim=True).clamp(max=0), wide.amax(2, keepdim=True)
    centre, reach = (high + low) / 2, (high - low) / 2
    units = torch.cat((_unit(reach * (2 / 15)), _unit(-low)), 2)
    unit_scale, unit_minimum = units.float().repeat_interleave(8, 1)[..., None].unbind(2)
    best = torch.full_like(low, torch.inf)
    values, multiples = torch.zeros_like(wide, dtype=torch.uint8), torch.zeros_like(wide[..., :2], dtype=torch.uint8)
    for shrink in SHRINKS:
        minima = _nearest((reach * shrink - centre) / unit_minimum, MULTIPLES)
        minimum = minima * unit_minimum
        # From the minimum as it was rounded to the largest that is left; what is not all the same has a step.
        scales = _nearest((centre + reach * shrink + minimum) / 15 / unit_scale, MULTIPLES)
        scales = torch.where(reach > 0, scales.clamp(min=1), scales)
        scale = scales * unit_scale
        q = _nearest((wide + minimum) / scale, 15)
        error = _sum_of_halves((q * scale - minimum - wide).square())
        better = error < best
        best = torch.where(better, error, best)
        values = torch.where(better, q.to(torch.uint8), values)
        multiples = torch.where(better, torch.cat((scales, minima), 2).to(torch.uint8), multiples)
    lost = best.isinf().view(len(wide), -1, 8, 1).any(2)
    lost_groups = lost.repeat_interleave(8, 1)
    return (
        values.masked_fill(lost_groups, 0),
        units.masked_fill(lost, torch.nan),
        multiples.masked_fill(lost_groups, 0),
    )


def _unit(of_groups: Tensor) -> Tensor:
    """float32 [N, 8 S, 1] -> float16 [N, S, 1]: what the largest of each eight is :data:`MULTIPLES` times, rounded up:
    half a unit in the last place is added before it is rounded to the nearest, of float16 or of its smallest."""
    return (of_groups.view(len(of_groups), -1, 8, 1).amax(2) / MULTIPLES * (1 + 2**-11) + 2**-25).half()


def _nearest(x: Tensor, most: int) -> Tensor:
    """The nearest integer from 0 to ``most``, 0 of what is not finite."""
    return x.nan_to_num(0.0, 0.0, 0.0).round().clamp(0, most)


def _sum_of_halves(x: Tensor) -> Tensor:
    """[N, G, 32] -> [N, G, 1], in an order that vectors can follow."""
    while x.shape[2] > 1:
        half = x.shape[2] // 2
        x = x[..., :half] + x[..., half:]
    return x
