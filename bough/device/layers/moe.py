"""Mixtures of experts (Shazeer et al. 2017): a router, and gated feed-forward layers of which a token uses a few.

Shapes: T tokens, D hidden size, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bough.base.errors import ConfigError
from bough.device.layers.block import FeedForward
from bough.device.layers.context import LayerContext
from bough.device.lora.pool import AdaptedLayer
from bough.device.lora.updates import ExpertStack
from bough.device.ops.experts import Clamp, ExpertParts, HeldWeight
from bough.device.quant.base import LinearMethod

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How tokens choose their experts.

    Attributes:
        n_experts, top_k: E and k.
        scores: of all experts by "softmax" or "sigmoid"; of those alone that have the largest logits, "chosen" is a
            softmax, "each" a sigmoid.
        normalise: the weights of a token's experts add up to 1, before ``scale``.
        scale: factor of the weights.
        n_groups, top_groups: experts come in groups, of which a token uses a few (DeepSeek-AI 2024); the score of a
            group is the best of its experts', or the sum of its two best with ``pair_groups``.
    """

    n_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "chosen", "each"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    pair_groups: bool = False

    def check(self) -> None:
        """ConfigError for numbers that do not go together."""
        groups, rest = divmod(self.n_experts, max(self.n_groups, 1))
        if not (1 <= self.top_groups <= self.n_groups and not rest and 1 <= self.top_k <= self.top_groups * groups):
            raise ConfigError(
                f"{self.top_k} of {self.n_experts} experts in {self.top_groups} of {self.n_groups} groups do not work"
            )
        if self.pair_groups and groups < 2:
            raise ConfigError(f"{self.n_groups} groups of {self.n_experts} experts have no two best experts each")


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights: int32 and float32 [T, k], best first.

    Args:
        logits: float32 [T, E].
        correction: [E], added to the scores by which experts are chosen, but not to the weights.
    """
    if routing.scores in ("chosen", "each"):
        best, ids = logits.topk(routing.top_k)
        return ids.int(), (best.softmax(-1) if routing.scores == "chosen" else best.sigmoid()) * routing.scale
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = scores if correction is None else scores + correction
    if routing.n_groups > 1:
        grouped = choice.view(len(choice), routing.n_groups, -1)
        best_of = grouped.topk(2).values.sum(-1) if routing.pair_groups else grouped.amax(-1)
        kept = torch.zeros_like(best_of, dtype=torch.bool).scatter_(1, best_of.topk(routing.top_groups).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k).indices
    weights = scores.gather(1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if routing.scores == "sigmoid" else 0))
    return ids.int(), weights * routing.scale


class Router:
    """The linear layer whose outputs choose the experts, in float32 however other weights are held."""

    def __init__(
        self, context: LayerContext, name: str, hidden_size: int, routing: Routing, *, bias: bool = False,
        correction: str | None = None,
    ) -> None:  # fmt: skip
        """``correction`` is the name of the parameter [E] that :func:`route` adds."""
        routing.check()
        n = routing.n_experts
        weight = context.parameter(f"{name}.weight", (n, hidden_size), torch.float32)
        biases = context.parameter(f"{name}.bias", (n,), torch.float32) if bias else None
        self._linear = context.ops.linear(weight, biases)
        self._adapted = context.adapted([(name, n)], hidden_size, torch.float32)
        self._correction = context.parameter(correction, (n,), torch.float32) if correction else None
        self._routing = routing

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> ids int32 and weights float32 [T, k]."""
        x = x.float()
        logits = self._linear(x)
        return route(logits if self._adapted is None else self._adapted(x, logits), self._routing, self._correction)


@dataclass(frozen=True, slots=True)
class Expert:
    """One gated feed-forward layer: gates and values, and the way down; and what adapters add to each."""

    gate_up: LinearMethod
    down: LinearMethod
    adapted_gate_up: AdaptedLayer | None = None
    adapted_down: AdaptedLayer | None = None

    def changed_by(self, place: int) -> bool:
        """Whether the adapter in this place changes it."""
        return any(layer is not None and layer.changes(place) for layer in (self.adapted_gate_up, self.adapted_down))


class Experts:
    """The feed-forward layers of all experts of one layer."""

    def __init__(
        self, context: LayerContext, experts: Sequence[Expert], hidden_size: int, inner_size: int,
        clamp: Clamp | None = None,
    ) -> None:  # fmt: skip
        self._experts, self._adapters = experts, context.adapters
        self._activation: Callable[[Tensor], Tensor] = clamp or context.ops.silu_mul
        parts = [ExpertParts(e.gate_up.parts, e.down.parts, _stored(e)) for e in experts]
        self._fused = context.ops.experts(parts, (hidden_size, inner_size), clamp)
        context.routed = True
        # One after another, the host has to know which experts are used.
        context.capturable &= self._fused is not None
        if context.adapters is not None:
            context.adapters.capturable = False

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, D], ids int32 [T, k] and weights float32 [T, k] -> the weighted sum of the experts' outputs [T, D]."""
        places = None if self._adapters is None else self._adapters.places
        if places is not None:
            changing = [p for p in torch.unique(places).tolist() if any(e.changed_by(p) for e in self._experts)]
            changed = torch.isin(places, torch.tensor(changing, dtype=places.dtype))
            # Each token goes the way that its own adapter needs, whoever is in the batch.
            out = torch.empty_like(x)
            out[~changed] = self._plain(x[~changed], ids[~changed], weights[~changed])
            out[changed] = self._one_by_one(x[changed], ids[changed], weights[changed], places[changed])
            return out
        return self._plain(x, ids, weights)

    def _plain(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self._fused is not None:
            return self._fused(x, ids, weights)
        return self._one_by_one(x, ids, weights, None)

    def _one_by_one(self, x: Tensor, ids: Tensor, weights: Tensor, places: Tensor | None) -> Tensor:
        """One expert after another; ``places`` [T], on the host, are those of the tokens' adapters."""
        # One wait for the device: which experts are used, by which tokens, and whose those are, is all the host's.
        k, chosen = ids.shape[1], ids.flatten().cpu()
        products = x.new_empty((len(chosen), x.shape[1]), dtype=torch.float32)
        for e in torch.unique(chosen).tolist():
            pairs = (chosen == e).nonzero()[:, 0]
            tokens, expert = pairs // k, self._experts[e]
            rows, of_rows = x[tokens], None if places is None else places[tokens]
            inner = self._activation(_adapted(expert.gate_up.apply(rows), rows, of_rows, expert.adapted_gate_up))
            products[pairs] = _adapted(expert.down.apply(inner), inner, of_rows, expert.adapted_down).float()
        total = x.new_zeros(x.shape, dtype=torch.float32)
        for j in range(k):
            total.addcmul_(products[j::k], weights[:, j : j + 1])
        return total.to(x.dtype)


def _stored(expert: Expert) -> tuple[HeldWeight, HeldWeight] | None:
    gate_up, down = expert.gate_up.stored, expert.down.stored
    return None if gate_up is None or down is None else (gate_up, down)


def _adapted(out: Tensor, x: Tensor, places: Tensor | None, layer: AdaptedLayer | None) -> Tensor:
    return out if places is None or layer is None else layer.rows(places, x, out)


class SparseMoE:
    """Routed experts, and beside them one that every token uses. The router takes inputs as they are."""

    takes: torch.dtype | None = None

    def __init__(self, router: Router, experts: Experts, shared: FeedForward | None = None) -> None:
        self._router, self._experts, self._shared = router, experts, shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        out = self._experts(x, *self._router(x))
        return out if self._shared is None else out.add_(self._shared(x))


class WeightedInputs:
    """Routed experts whose inputs, not outputs, are weighted (Llama 4), and one that every token uses."""

    takes: torch.dtype | None = None

    def __init__(self, router: Router, experts: Experts, shared: FeedForward) -> None:
        self._router, self._experts, self._shared = router, experts, shared

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        ids, weights = self._router(x)
        out, whole = self._shared(x), torch.ones_like(weights[:, :1])
        for j in range(ids.shape[1]):
            entering = (x * weights[:, j : j + 1]).to(x.dtype)
            out += self._experts(entering, ids[:, j : j + 1].contiguous(), whole)
        return out


class GatedExpert:
    """A shared expert whose output is weighted by ``sigmoid(x w)``, a weight of its own for each token."""

    takes: torch.dtype | None = None

    def __init__(self, context: LayerContext, gate: str, hidden_size: int, expert: FeedForward) -> None:
        self._gate = context.ops.linear(context.parameter(f"{gate}.weight", (1, hidden_size), torch.float32), None)
        self._adapted = context.adapted([(gate, 1)], hidden_size, torch.float32)
        self._expert = expert

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        whole = x.float()
        weight = self._gate(whole)
        if self._adapted is not None:
            weight = self._adapted(whole, weight)
        return (self._expert(x) * weight.sigmoid()).to(x.dtype)


def read_experts(
    context: LayerContext, prefix: str, n_experts: int, names: tuple[str, str, str], hidden_size: int, inner_size: int,
    swapped: bool = False,
) -> Experts:  # fmt: skip
    """Experts whose weights the checkpoint has one by one, as ``prefix.0.name.weight`` of ``names``: gate, up, down.

    ``swapped`` as in :class:`bough.device.lora.updates.ExpertStack`.
    """
    gate, up, down = names

    def read(e: int) -> tuple[LinearMethod, LinearMethod]:
        at = f"{prefix}.{e}"
        first, second = [(f"{at}.{gate}", inner_size), (f"{at}.{up}", inner_size)], [(f"{at}.{down}", hidden_size)]
        return (
            context.linear([(f"{name}.weight", size) for name, size in first], hidden_size, None),
            context.linear([(f"{name}.weight", size) for name, size in second], inner_size, None),
        )

    experts = adaptable(
        context, prefix, [read(e) for e in range(n_experts)], names, hidden_size, inner_size, False, swapped
    )
    return Experts(context, experts, hidden_size, inner_size)


def adaptable(
    context: LayerContext, prefix: str, experts: Sequence[tuple[LinearMethod, LinearMethod]],
    names: tuple[str, str, str], hidden_size: int, inner_size: int, alternating: bool = False,
    swapped: bool = False,
) -> list[Expert]:  # fmt: skip
    """Experts of (gates and values, way down), with what adapters add: to projections ``prefix.0.name`` of ``names``,
    or to all of them at once, as :class:`ExpertStack` says."""
    gate, up, down = names
    if context.adapters is not None:
        stack = ExpertStack(prefix, len(experts), names, hidden_size, inner_size, alternating, swapped)
        context.adapters.stack(stack)
    return [
        Expert(
            gate_up,
            way_down,
            context.adapted([(f"{prefix}.{e}.{gate}", inner_size), (f"{prefix}.{e}.{up}", inner_size)], hidden_size),
            context.adapted([(f"{prefix}.{e}.{down}", hidden_size)], inner_size),
        )
        for e, (gate_up, way_down) in enumerate(experts)
    ]
