"""Root mean square normalisation (Zhang and Sennrich 2019), and layer normalisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from bough.device.layers.context import LayerContext
from bough.device.ops.rounded import RoundedRows, Rows

Tensor = torch.Tensor


class Norm(Protocol):
    """A norm, alone or behind the residual stream."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, D], as a new tensor."""
        ...

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; the norm of the new residual."""
        ...

    def rounded(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> RoundedRows:
        """The norm of x, or ``add`` where there is a residual, rounded to ``dtype`` for the layers that take it so."""
        ...


def normed(norm: Norm, x: Tensor, residual: Tensor | None, takes: torch.dtype | None) -> Rows:
    """The norm of x or, with a residual, ``add``, as a layer ``takes`` it (:class:`.linear.Linear`)."""
    if takes is not None:
        return norm.rounded(x, residual, takes)
    return norm(x) if residual is None else norm.add(x, residual)


@dataclass(frozen=True, slots=True)
class NormForm:
    """How the norms of a model are computed.

    Attributes:
        eps: added to the mean of squares.
        offset: what a parameter lacks to be the factor: 1 for Gemma.
        wide: the factor is float32 and multiplies before anything is rounded; otherwise the normalised value is rounded
            to the model's dtype first. Always so with an offset.
    """

    eps: float
    offset: float = 0.0
    wide: bool = False


def norm_weight(context: LayerContext, name: str, size: int, form: NormForm) -> Tensor:
    """The factor [size] of the norm ``name``, float32 if ``form`` is wide."""
    if not form.wide and not form.offset:
        return context.parameter(f"{name}.weight", (size,))
    return context.parameter(f"{name}.weight", (size,), torch.float32) + form.offset


class RMSNorm:
    """One norm with ``weight`` [D]; ``add`` fuses it with the residual stream."""

    def __init__(self, context: LayerContext, name: str, size: int, form: NormForm) -> None:
        self.weight = norm_weight(context, name, size, form)
        self._eps = form.eps
        self._ops = context.ops

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, D], as a new tensor."""
        return self._ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; the norm of the new residual."""
        return self._ops.add_rms_norm(x, residual, self.weight, self._eps)

    def rounded(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> RoundedRows:
        """See :class:`Norm`."""
        return self._ops.rms_norm_rounded(x, residual, self.weight, self._eps, dtype)


class LayerNorm:
    """Layer normalisation (Ba et al. 2016), with weight and, unless it has none, bias."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float, bias: bool = True) -> None:
        self._weight = context.parameter(f"{name}.weight", (size,))
        self._bias = context.parameter(f"{name}.bias", (size,)) if bias else None
        self._eps, self._ops = eps, context.ops

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, D], as a new tensor."""
        return torch.nn.functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """``residual += x`` in place; the norm of the new residual."""
        residual += x
        return self(residual)

    def rounded(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> RoundedRows:
        """See :class:`Norm`."""
        return self._ops.round_rows(self(x) if residual is None else self.add(x, residual), dtype)
