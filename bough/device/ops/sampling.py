"""Draws and log-probabilities in plain torch, and the arguments that every implementation of them takes.

A row's token inverts the cumulative distribution, in the order of the vocabulary, at one uniform number that is a
function of (seed, position). What is likelier is decided on z = (logit - largest) / temperature, computed in float32,
ties by the lowest id; weights are exp(z), summed in float64. So implementations agree on every comparison, and the
tokens that they draw differ only where a draw falls within rounding of the edge between two tokens.

Filters: the top_k likeliest; of those the fewest likeliest whose weights reach top_p of the sum of all of them; of
those the ones whose z is at least ``least_z``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor

BLOCK = 256
"""Weights are summed in blocks of this many tokens, so that a draw scans V / BLOCK + BLOCK of them."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of S draws; contiguous arrays [S], on the host but for ``best``.

    Attributes:
        best: int64 beside the logits, index of the largest logit of the row; -1 for a row that is not to be sampled.
        temperature: float32, positive.
        top_k: int64 in [1, V]; V keeps all.
        top_p: float64 in (0, 1]; 1 keeps all.
        least_z: float64, the logarithm of min-p; -inf keeps all.
        seeds: uint64.
        positions: int64, index in the sequence of the token that is drawn.
    """

    best: Tensor
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    least_z: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    @property
    def n(self) -> int:
        """S."""
        return len(self.best)

    def columns(self, u: NDArray[np.float64]) -> NDArray[np.float64]:
        """[5, S]: temperature, top_k, top_p, least_z, and the numbers ``u`` [S] at which the draws invert."""
        return np.stack((self.temperature, self.top_k, self.top_p, self.least_z, u)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of N rows.

    Attributes:
        chosen: [N] float32, of the given tokens.
        ranks: [N] int64, their ranks from 1, falling, ties by rising id.
        top_ids: [N, n] int64, the likeliest tokens in the order of their ranks; -1 where a NaN leaves fewer.
        top: [N, n] float32, theirs.
        asked: [N, A] float32, of the ids asked for.
    """

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor
    asked: Tensor

    @classmethod
    def empty(cls, n: int, n_top: int, n_asked: int, device: torch.device | None = None) -> TokenLogprobs:
        """Uninitialised."""
        return cls(
            torch.empty(n, device=device),
            torch.empty(n, dtype=torch.int64, device=device),
            torch.empty((n, n_top), dtype=torch.int64, device=device),
            torch.empty((n, n_top), device=device),
            torch.empty((n, n_asked), device=device),
        )


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), 53 bits each; all arrays [S].

    The stream of a seed is SplitMix64 (Steele, Lea, Flood 2014) started at a scrambled seed and read at index
    ``position``, so that neighbouring seeds have unrelated streams.
    """
    with np.errstate(over="ignore"):
        start = _mix(seeds + _GOLDEN)
        bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    scaled: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: a bijection that scatters neighbouring inputs."""
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """The specification of :meth:`bough.device.ops.registry.Ops.sample`."""
    device, drawn = logits.device, draws.best >= 0
    # A row that is not to be sampled may hold anything; zeros can be counted with.
    wide = logits.float().where(drawn[:, None], 0.0)
    largest = wide.gather(1, draws.best.clamp(min=0)[:, None])
    z = (wide - largest) / torch.from_numpy(draws.temperature)[:, None].to(device)
    weights = z.exp()
    for i in range(draws.n):
        top_k, top_p, least_z = int(draws.top_k[i]), float(draws.top_p[i]), float(draws.least_z[i])
        if top_k < logits.shape[1] or top_p < 1.0:
            weights[i, dropped(z[i], weights[i], top_k, top_p)] = 0.0
        weights[i, z[i].double() < least_z] = 0.0
    u = torch.from_numpy(uniforms(draws.seeds, draws.positions)).to(device)
    return invert(weights, u).where(drawn, -1)


def dropped(z: Tensor, weights: Tensor, top_k: int, top_p: float) -> Tensor:
    """Ids of one row [V] that top-k, then top-p, do not keep."""
    order = z.argsort(descending=True, stable=True)
    ends = weights[order[:top_k]].double().cumsum(0)
    n_kept = len(ends) if top_p >= 1.0 else int((ends < top_p * ends[-1]).sum()) + 1
    return order[n_kept:]


def invert(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution in the order of the columns: [S] int64.

    Args:
        weights: [S, V] float32, at least 0, each row with a positive and finite sum; need not be normalised.
        u: [S] float64 in [0, 1).

    The result for a row depends on that row alone. A column of weight 0 is never drawn.
    """
    n, width = weights.shape
    weights = torch.nn.functional.pad(weights.double(), (0, -width % BLOCK)).view(n, -(-width // BLOCK), BLOCK)
    ends = weights.sum(-1).cumsum(-1)
    block, rest = _find(ends, u * ends[:, -1])
    chosen = weights[torch.arange(n, device=weights.device), block].cumsum(-1)
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


def logprobs(logits: Tensor, tokens: Tensor, n_top: int, asked: Tensor) -> TokenLogprobs:
    """The specification of :meth:`bough.device.ops.registry.Ops.logprobs`."""
    wide = logits.float()
    values = wide.log_softmax(-1)
    own = wide.gather(1, tokens[:, None])
    before = (wide == own) & (torch.arange(wide.shape[1], device=wide.device) < tokens[:, None])
    top_ids = wide.argsort(dim=-1, descending=True, stable=True)[:, :n_top]
    return TokenLogprobs(
        values.gather(1, tokens[:, None])[:, 0],
        ((wide > own) | before).sum(-1) + 1,
        top_ids,
        values.gather(1, top_ids),
        values[:, asked],
    )


def penalise(logits: Tensor, entries: Tensor) -> None:
    """See :meth:`bough.device.ops.registry.Ops.penalise`."""
    rows, ids = entries[0], entries[1]
    factor, subtracted = entries[2].view(torch.float32), entries[3].view(torch.float32)
    values = logits[rows, ids]
    logits[rows, ids] = torch.where(values > 0, values / factor, values * factor) - subtracted


def apply_bitmask(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """The specification of :meth:`bough.device.ops.registry.Ops.apply_bitmask`."""
    bits = masks[..., None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
