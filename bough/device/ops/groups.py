"""Which rows of a step have leading locs in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedGroups:
    """G disjoint groups of rows; all tensors int32 on the host or the device, wherever attention is planned.

    Attributes:
        start: [G + 1] where the members of each group begin in ``rows``.
        rows: batch indices of the members, group after group.
        tokens: [G] how many of their first locs are equal; all of them come before the members' new tokens.
    """

    start: Tensor
    rows: Tensor
    tokens: Tensor
