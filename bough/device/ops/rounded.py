"""Inputs of linear layers in 8 bits, with a scale for each token (dynamic quantisation: Dettmers et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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


class _Unrounded(Protocol):
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def silu_mul(self, x: Tensor) -> Tensor: ...
    def gelu_mul(self, x: Tensor) -> Tensor: ...


class RoundsBehind:
    """The ops of :class:`bough.device.ops.registry.Ops` that round, each behind the op that makes what is rounded."""

    def round_rows(self, x: Tensor, dtype: torch.dtype) -> RoundedRows:
        return round_rows(x, dtype)

    def rms_norm_rounded(
        self: _Unrounded, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> RoundedRows:
        normed = self.rms_norm(x, weight, eps) if residual is None else self.add_rms_norm(x, residual, weight, eps)
        return round_rows(normed, dtype)

    def gated_rounded(self: _Unrounded, x: Tensor, gelu: bool, dtype: torch.dtype) -> RoundedRows:
        return round_rows(self.gelu_mul(x) if gelu else self.silu_mul(x), dtype)
