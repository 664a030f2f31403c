"""What is kept of a distribution: top-k, then top-p, then min-p; ties go to the lowest ids.

Nothing sorts the whole vocabulary. A filter is a threshold on a row's weights, and how many of the tokens that
lie exactly on it are kept: top-k finds it by partial selection, top-p in the likeliest tokens, and where
those do not reach p by bisection. R rows at a time; a row's result depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.base.params import SamplingParams
from bough.worker.sampling.base import Tensor

LIKELIEST = 1024
"""Top-p looks at this many of the likeliest tokens before it turns to bisection."""

BLOCK = 256
_ONE = 0x3F800000
"""The bits of 1.0, the largest weight; non-negative floats are ordered as their bits are."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of one row; ``top_k`` is the size of the vocabulary where it keeps everything."""

    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int) -> Filters | None:
        """None if the parameters keep every token."""
        top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
        if top_k == vocab_size and params.top_p >= 1.0 and params.min_p <= 0.0:
            return None
        return cls(top_k, params.top_p, params.min_p)


def filter_weights(weights: Tensor, filters: list[Filters]) -> None:
    """Set the weights of what is not kept to 0, in place.

    Args:
        weights: [R, V] float32, proportional to the probabilities of each row, the largest of them 1.
        filters: one per row.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=weights.device)[:, None]

    with_k = [i for i, f in enumerate(filters) if f.top_k < weights.shape[1]]
    if with_k:
        part = weights[with_k]
        _top_k(part, torch.tensor([filters[i].top_k for i in with_k], device=weights.device)[:, None])
        weights[with_k] = part
    with_p = [i for i, f in enumerate(filters) if f.top_p < 1.0]
    if with_p:
        part = weights[with_p]
        _top_p(part, column([filters[i].top_p for i in with_p]))
        weights[with_p] = part
    if any(f.min_p > 0.0 for f in filters):
        # The largest weight is 1, so that the threshold is min_p itself.
        weights.masked_fill_(weights < column([f.min_p for f in filters]), 0.0)


def _top_k(weights: Tensor, k: Tensor) -> None:
    """``k`` is [R, 1]."""
    likeliest = weights.topk(int(k.max()), dim=-1).values
    threshold = likeliest.gather(1, k - 1)
    _keep(weights, threshold, k - (weights > threshold).sum(-1, keepdim=True))


def _top_p(weights: Tensor, p: Tensor) -> None:
    """``p`` is [R, 1] float64."""
    target = p * _sums(weights)
    likeliest = weights.topk(min(LIKELIEST, weights.shape[1]), dim=-1).values
    ends = likeliest.double().cumsum(-1)
    index = (ends < target).sum(-1, keepdim=True)
    beyond = (index[:, 0] == ends.shape[1]).nonzero()[:, 0]
    threshold = likeliest.gather(1, index.clamp(max=ends.shape[1] - 1))
    if len(beyond):
        threshold[beyond] = _threshold(weights[beyond], target[beyond])
    above = _sums(torch.where(weights > threshold, weights, 0.0))
    _keep(weights, threshold, ((target - above) / threshold).ceil().clamp(min=1))


def _threshold(weights: Tensor, target: Tensor) -> Tensor:
    """[R, 1]: the largest weight w such that the weights of at least w sum to ``target`` [R, 1]."""
    bits = weights.view(torch.int32)
    low = torch.zeros(target.shape, dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, _ONE + 1)
    for _ in range(_ONE.bit_length()):
        middle = (low + high) // 2
        reached = _sums(torch.where(bits >= middle, weights, 0.0)) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return low.view(torch.float32)


def _sums(weights: Tensor) -> Tensor:
    """[R, 1] float64. Summed in blocks, so that the order does not depend on the number of rows."""
    rest = -weights.shape[1] % BLOCK
    if rest:
        weights = torch.nn.functional.pad(weights, (0, rest))
    return weights.view(len(weights), -1, BLOCK).sum(-1).double().cumsum(-1)[:, -1:]


def _keep(weights: Tensor, threshold: Tensor, n_equal: Tensor) -> None:
    """Zero what lies below ``threshold`` [R, 1], and of what lies on it all but the first ``n_equal`` [R, 1]."""
    equal = weights == threshold
    if bool((equal.sum(-1, keepdim=True) > n_equal).any()):
        equal &= equal.cumsum(-1) <= n_equal
    weights.masked_fill_(~(equal | (weights > threshold)), 0.0)
