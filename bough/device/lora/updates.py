"""What an adapter adds to a model: updates of single projections, and of all experts of a layer at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bough.base.errors import ConfigError

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of one projection, ``scale * b a``: a [R, n_in], b [n_out, R]."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class StackedLowRank:
    """All experts of a layer, as PEFT updates them where they are one parameter (its ``target_parameters``): factors a
    [E * R, n_in], one expert behind the other, and b [n_out, R * E], the experts of each rank side by side. Or inputs
    and outputs are swapped, where PEFT takes the one for the other (:class:`ExpertStack`).

    Attributes:
        alphas: for the parameter of gates and values, and for that of the way down; the shapes tell which it is.
        stabilised: as :func:`scale_of`.
    """

    a: Tensor
    b: Tensor
    alphas: tuple[float, float]
    stabilised: bool


Updates = Mapping[str, LowRank | StackedLowRank]
"""An adapter: its updates by the names of what they change."""


def scale_of(alpha: float, rank: int, stabilised: bool) -> float:
    """``alpha / rank``, or over its root with rank-stabilised adapters (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if stabilised else rank)


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """All experts of a layer of a model, for updates of them as one.

    Attributes:
        prefix: of the experts' names, which are ``prefix.3.gate_proj``.
        names: gates, values, the way down.
        alternating: outputs of the first projection are a gate, a value, a gate, ...; otherwise gates, then values.
        swapped: PEFT takes this model's inputs of experts for outputs, from 0.19 on; before, it did so with others. It
            is what counts where no shape tells.
    """

    prefix: str
    n_experts: int
    names: tuple[str, str, str]
    hidden_size: int
    inner_size: int
    alternating: bool
    swapped: bool = False

    def split(self, parts: Sequence[StackedLowRank]) -> Iterator[tuple[str, LowRank]]:
        """The updates by expert and projection; ConfigError for shapes that are of neither parameter."""
        read = [(part, *self._parameter(part)) for part in parts]
        usual = next((swapped for _, _, swapped in read if swapped is not None), self.swapped)
        for part, which, swapped in read:
            rank = len(part.a) // self.n_experts
            a = part.a.view(self.n_experts, rank, -1)
            b = part.b.view(len(part.b), rank, self.n_experts).permute(2, 0, 1)
            if usual if swapped is None else swapped:
                a, b = b.transpose(1, 2), a.transpose(1, 2)
            scale = scale_of(part.alphas[which], rank, part.stabilised)
            for e in range(self.n_experts):
                for name, rows in self._outputs(which).items():
                    yield f"{self.prefix}.{e}.{name}", LowRank(a[e].contiguous(), b[e, rows].contiguous(), scale)

    def _parameter(self, part: StackedLowRank) -> tuple[int, bool | None]:
        """Whether it is the first parameter or the second, and swapped; None where both shapes are the same."""
        shapes = [(self.hidden_size, 2 * self.inner_size), (self.inner_size, self.hidden_size)]
        shape = part.a.shape[1], len(part.b)
        for which, (n_in, n_out) in enumerate(shapes):
            if shape in ((n_in, n_out), (n_out, n_in)) and len(part.a) % self.n_experts == 0:
                return which, None if n_in == n_out else shape != (n_in, n_out)
        raise ConfigError(
            f"the adapter's {self.prefix!r} has shapes {list(part.a.shape)} and {list(part.b.shape)}, which are no "
            f"update of {self.n_experts} experts"
        )

    def _outputs(self, which: int) -> dict[str, slice]:
        """The projections of the first parameter or the second, and which outputs of it are theirs."""
        gate, up, down = self.names
        if which:
            return {down: slice(None)}
        if self.alternating:
            return {gate: slice(0, None, 2), up: slice(1, None, 2)}
        return {gate: slice(0, self.inner_size), up: slice(self.inner_size, None)}
