"""Weights rounded to 4 bits when a model is loaded."""

from __future__ import annotations

import torch

from bough.device.ops.packed import GROUP, Kind, PackedWeight, pack_groups, pad_inputs
from bough.device.quant.base import Parameter

Tensor = torch.Tensor

ROWS = 1024
"""Outputs that are rounded at a time: what is held beside the weight stays small."""

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Shares of the range of a group that are tried: cutting the extremes off leaves finer steps for the rest."""


def int4_in_groups(parameter: Parameter) -> PackedWeight:
    """A scale and a minimum for each 32 inputs, those of least squared error among a few shares of the range."""
    weight = parameter.dense()
    n_groups = -(-weight.shape[1] // GROUP)
    q = torch.empty(len(weight), n_groups * GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), n_groups, 2, dtype=torch.float16, device=weight.device)
    for first in range(0, len(weight), ROWS):
        wide = pad_inputs(weight[first : first + ROWS].float(), GROUP).view(-1, n_groups, GROUP)
        values, scales[first : first + ROWS] = round_groups(wide)
        q[first : first + ROWS] = values.flatten(1)
    return pack_groups(Kind.Q4_MIN, q[:, : weight.shape[1]], scales)


def round_groups(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [N, G, 32] -> uint8 [N, G, 32] in 0 .. 15 and float16 [N, G, 2], scale and minimum."""
    low, high = wide.amin(2, keepdim=True), wide.amax(2, keepdim=True)
    centre, reach = (high + low) / 2, (high - low) / 2
    best = torch.full_like(low, torch.inf)
    values, scales = torch.zeros_like(wide, dtype=torch.uint8), wide.new_zeros(*wide.shape[:2], 2).half()
    for shrink in SHRINKS:
        scale, minimum = (reach * (2 * shrink / 15)).half().float(), (centre - reach * shrink).half().float()
        q = ((wide - minimum) / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(0, 15)
        error = (q * scale + minimum - wide).pow(2).sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        values = torch.where(better, q.to(torch.uint8), values)
        scales = torch.where(better, torch.cat((scale, minimum), 2).half(), scales)
    return values, scales
