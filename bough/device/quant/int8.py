"""Weights rounded to 8 bits when a model is loaded."""

from __future__ import annotations

import torch

from bough.device.ops.packed import GROUP, Kind, PackedWeight, pack_groups, pack_int8, pad_inputs
from bough.device.quant.base import Parameter

Tensor = torch.Tensor

ROWS = 4096
"""Outputs that are rounded at a time: what is held beside the weight stays small."""


def int8_per_output(parameter: Parameter) -> PackedWeight:
    """One symmetric scale per output, the largest magnitude at 127; inputs are rounded as they come (W8A8 dynamic)."""
    weight = parameter.dense()
    q = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for first in range(0, len(weight), ROWS):
        wide = weight[first : first + ROWS].float()
        scale = wide.abs().amax(1) / 127
        scales[first : first + ROWS] = scale
        q[first : first + ROWS] = _rounded(wide, scale[:, None])
    return pack_int8(q, scales)


def int8_in_groups(parameter: Parameter) -> PackedWeight:
    """A scale for each 32 inputs, as in GGUF's Q8_0: for embeddings and heads, whose errors reach every token."""
    weight = parameter.dense()
    n_groups = -(-weight.shape[1] // GROUP)
    q = torch.empty(len(weight), n_groups * GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(len(weight), n_groups, dtype=torch.float16, device=weight.device)
    for first in range(0, len(weight), ROWS):
        wide = pad_inputs(weight[first : first + ROWS].float(), GROUP).view(-1, n_groups, GROUP)
        scale = (wide.abs().amax(2) / 127).half()
        scales[first : first + ROWS] = scale
        q[first : first + ROWS] = _rounded(wide, scale.float()[..., None]).flatten(1)
    return pack_groups(Kind.Q8, q[:, : weight.shape[1]], scales)


def _rounded(wide: Tensor, scale: Tensor) -> Tensor:
    """``128 + wide / scale`` to the nearest; 128 where the scale is 0."""
    return (wide / scale).nan_to_num(0.0, 0.0, 0.0).round().clamp(-127, 127).add(128).to(torch.uint8)
