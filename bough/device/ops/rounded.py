"""Inputs of linear layers in 8 bits, with a scale for each token (dynamic quantisation: Dettmers et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""What rows are rounded to -> its largest number that is used."""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows that stand for ``data * scale``.

    Attributes:
        data: [T, K] int8 or float8_e4m3fn, contiguous.
        scale: [T, 1] float32, the largest magnitude of the row over the largest number of ``data``'s dtype; NaN for a
            row that is not finite.
        dtype: of what was rounded, and of products with it.
    """

    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.data)


Rows = Tensor | RoundedRows
"""[T, K] as a layer takes them."""


def round_rows(x: Tensor, dtype: torch.dtype) -> RoundedRows:
    """x [T, K] rounded to ``dtype``, to the nearest number, ties to even."""
    wide = x.float()
    top = wide.abs().amax(1, keepdim=True)
    scale = top / LARGEST[dtype]
    scaled = wide / scale.where(top > 0, 1.0)
    data = scaled.round().nan_to_num(0.0) if dtype == torch.int8 else scaled
    return RoundedRows(data.to(dtype), scale.where(top.isfinite(), torch.nan), x.dtype)
