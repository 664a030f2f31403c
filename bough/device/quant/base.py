"""The seams between layers and how their weights are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.packed import PackedWeight
from bough.device.ops.rounded import RoundedRows

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [out, in] in a block format of ggml, as a file holds it.

    Attributes:
        format: ggml's name, e.g. "Q4_0".
        rows: uint8 [out, bytes of a row].
        n_in: values of a row.
    """

    format: str
    rows: Tensor
    n_in: int


class Parameter(Protocol):
    """A weight [out, in] that is still in the checkpoint."""

    def dense(self) -> Tensor:
        """Read it, in the model's dtype, a new tensor."""
        ...

    def blocks(self) -> Blocks | PackedWeight | HeldWeight | None:
        """Read it without decoding, in blocks, as the kernels take it, or as 8-bit floats; None if it is not held like
        that."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A :class:`Parameter` that is in memory, in the model's dtype."""

    weight: Tensor

    def dense(self) -> Tensor:
        return self.weight

    def blocks(self) -> None:
        return None


class RoundedMethod(Protocol):
    """A linear layer for inputs that come rounded, so that what makes them can round them, once for all layers.

    Attributes:
        takes: int8 or float8_e4m3fn, what they are rounded to.
    """

    takes: torch.dtype

    def __call__(self, x: RoundedRows) -> Tensor:
        """[T, in] -> [T, out], a new tensor."""
        ...


class LinearMethod(Protocol):
    """Owns the weight of one linear layer, in whatever form multiplies fastest.

    Attributes:
        parts: packed weights whose outputs, side by side, are the layer's; empty where it multiplies otherwise. For
            kernels that multiply with them themselves, as long as the method lives.
        rounded: gives what ``apply`` does, bit for bit, for inputs rounded by the ops' ``round_rows``; None: the layer
            takes inputs as they are.
        stored: the weight for kernels of many layers at once; None where there is no one weight.
    """

    @property
    def stored(self) -> HeldWeight | None: ...

    @property
    def parts(self) -> Sequence[PackedLinear]: ...

    @property
    def rounded(self) -> RoundedMethod | None: ...

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        ...


class Table(Protocol):
    """Owns the weight of an embedding.

    Attributes:
        packed: the weight, for kernels that look it up themselves; None where it is held otherwise.
    """

    @property
    def packed(self) -> PackedWeight | None: ...

    def lookup(self, tokens: Tensor) -> Tensor:
        """[T] int32 ids -> [T, D] in the model's dtype, a new tensor."""
        ...

    def head(self, n_ids: int) -> LinearMethod:
        """The linear layer whose outputs are the products with the first ``n_ids`` rows, on the same memory."""
        ...


class Scheme(Protocol):
    """How all weights of a model are held. It reads each parameter once and keeps nothing else of it."""

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        """One layer of parameters stacked by outputs, and bias [out] or None."""
        ...

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        """The language-model head, for the first ``n_ids`` outputs of ``pieces`` stacked by outputs."""
        ...

    def table(self, pieces: Sequence[Parameter], tied: bool) -> Table:
        """The embedding, in pieces likewise; ``tied`` says that its ``head`` will be asked for."""
        ...
