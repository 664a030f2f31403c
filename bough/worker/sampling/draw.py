"""Randomness and the draw: functions of (seed, position), the same whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor

BLOCK = 256
"""Probabilities are summed in blocks of this many tokens, so that a draw scans V / BLOCK + BLOCK of them."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that scatters neighbouring inputs."""
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), 53 bits each; all arrays [S].

    The stream of a seed is SplitMix64 started at a scrambled seed and read at index ``position``, so that
    neighbouring seeds have unrelated streams.
    """
    with np.errstate(over="ignore"):
        start = _mix(seeds + _GOLDEN)
        bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    scaled: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in the order of the columns: [S] int64.

    Args:
        weights: [S, V] float32, at least 0, each row with a positive and finite sum; need not be normalised.
        u: [S] float64 in [0, 1).

    The result for a row depends on that row alone. A column of weight 0 is never drawn.
    """
    n, width = weights.shape
    blocks = -(-width // BLOCK)
    if blocks * BLOCK != width:
        weights = torch.nn.functional.pad(weights, (0, blocks * BLOCK - width))
    weights = weights.view(n, blocks, BLOCK)
    ends = weights.sum(-1).double().cumsum(-1)
    block, rest = _find(ends, u * ends[:, -1])
    chosen = weights[torch.arange(n, device=weights.device), block].double().cumsum(-1)
    column, _ = _find(chosen, rest)
    return block * BLOCK + column


def _find(ends: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First column of ``ends`` [S, N] (rising) above ``target`` [S], and how far into that column it lies.

    Rounding may put a target at or past the last end; it is then the last column that has any weight.
    """
    below_total = torch.nextafter(ends[:, -1], torch.zeros_like(target))
    target = torch.minimum(target, below_total)
    index = torch.searchsorted(ends, target[:, None], right=True)
    before = torch.where(index > 0, ends.gather(1, (index - 1).clamp(min=0)), 0.0)
    return index[:, 0], target - before[:, 0]
