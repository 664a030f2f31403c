"""The Hadamard transform of blocks of inputs, before they are rounded to 8 bits.

A few inputs of a token are many times larger than the others, and a scale that reaches them leaves few steps for the
rest. The transform spreads each over its block, so that one scale does for all inputs of a token. It is its own inverse
but for a factor: weights are transformed while they are loaded, and products stay what they are (as in QuaRot, Ashkboos
et al. 2024).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

BLOCK = 64
"""Inputs that are transformed together."""


def transform(x: Tensor) -> Tensor:
    """x [T, K] float32 -> [T, K filled up with zeros to whole blocks]: each block times the Hadamard matrix of
    Sylvester's order, whose entries are 1 and -1.

    Sums and differences of halves, of halves of these and so on, in float32. Done twice it is ``BLOCK * x``.
    """
    missing = -x.shape[1] % BLOCK
    x = torch.nn.functional.pad(x, (0, missing)) if missing else x
    shape, half = x.shape, BLOCK // 2
    while half:
        a, b = x.reshape(-1, 2, half).unbind(1)
        x = torch.stack((a + b, a - b), dim=1)
        half //= 2
    return x.reshape(shape)
