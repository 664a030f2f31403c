"""The adapters that a worker holds, by place, and which tokens of a step use which."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from bough.base.errors import ConfigError
from bough.base.plan import NO_ADAPTER
from bough.device.lora.updates import ExpertStack, LowRank, StackedLowRank, Updates
from bough.device.ops.library import LinearParts
from bough.device.ops.lora import CapturedLora, LoraOp, LoraPlaces, Runs, Update, padded_rank
from bough.device.ops.registry import Ops

Tensor = torch.Tensor

MAX_RANK = 256

_ROOT = re.compile(r"\A(?:model\.|language_model\.)+")
"""What stands before the names of a decoder's layers: it depends on what it is a part of, and who saved it."""


class AdaptedWeights:
    """One or more projections of one input, with the updates of the adapters that change them."""

    def __init__(self, op: LoraPlaces, names: Sequence[str], sizes: Sequence[int], n_in: int) -> None:
        self._op, self._names, self._sizes, self._n_in = op, names, sizes, n_in
        self._places: set[int] = set()

    def read(self, modules: Mapping[str, LowRank]) -> Update | None:
        """What these projections, by name, add to the layer. ConfigError for shapes that do not fit."""
        found = [modules.get(name) for name in self._names]
        if not any(found):
            return None
        for name, size, part in zip(self._names, self._sizes, found):
            if part is not None:
                rank = len(part.a)
                if part.a.shape != (rank, self._n_in) or part.b.shape != (size, rank):
                    raise ConfigError(
                        f"the adapter's {name!r} has shapes {list(part.a.shape)} and {list(part.b.shape)}; the model "
                        f"needs [rank, {self._n_in}] and [{size}, rank]"
                    )
        return Update(
            [None if part is None else part.a.float() for part in found],
            [None if part is None else part.b.float() * part.scale for part in found],
        )

    def set(self, place: int, update: Update | None) -> None:
        """Put an update in its place, or take it away."""
        if update is not None or place in self._places:
            self._op.set(place, update)
        (self._places.discard if update is None else self._places.add)(place)

    def changes(self, place: int) -> bool:
        """Whether the adapter there changes this layer."""
        return place in self._places


class AdaptedLayer(AdaptedWeights):
    """A linear layer of the model, whose updates ``op`` adds."""

    def __init__(self, pool: AdapterPool, op: LoraOp, names: Sequence[str], sizes: Sequence[int], n_in: int) -> None:
        super().__init__(op, names, sizes, n_in)
        self.op, self._pool = op, pool

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """``out`` [T, n_out] plus the updates of x [T, n_in], in place."""
        runs, captured = self._pool.runs, self._pool.captured
        if captured is not None and isinstance(self.op, CapturedLora):
            self.op.add(captured, x, out)
        elif runs is not None and self._places:
            self.op(runs, x, out)
        return out

    def rows(self, places: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """The same for other rows than those of the step: ``places`` [T] are theirs."""
        runs = self._pool.runs_of(places.tolist())
        if runs is not None and self._places:
            self.op(runs, x, out)
        return out


class AdaptedHead(AdaptedLayer):
    """A language-model head [V, n_in], of whose outputs the first ``n_ids`` are computed."""

    def __init__(self, pool: AdapterPool, op: LoraOp, name: str, shape: tuple[int, int], n_ids: int) -> None:
        super().__init__(pool, op, [name], [n_ids], shape[1])
        self._name, self._vocab_size, self._n_ids = name, shape[0], n_ids

    def read(self, modules: Mapping[str, LowRank]) -> Update | None:
        part = modules.get(self._name)
        if part is None or len(part.b) != self._vocab_size:
            return super().read(modules)
        return super().read({self._name: replace(part, b=part.b[: self._n_ids])})


class AdapterPool:
    """Places for adapters. Not shared between threads.

    Attributes:
        runs: the tokens of the step that have an adapter; None where none has.
        places: [T] int64, on the host, the place of each token of the step, or NO_ADAPTER; None where none has.
        captured: the same on the device, int32, in a step that is captured; None in others.
        capturable: steps of rows with adapters can be.
        ignores: whether a layer of this name takes part in nothing that is computed here, as one for images.
    """

    def __init__(self, ops: Ops, dtype: torch.dtype, n_places: int) -> None:
        self.n_places = n_places
        self.runs: Runs | None = None
        self.places: Tensor | None = None
        self.captured: Tensor | None = None
        self.capturable = True
        self.ignores: Callable[[str], bool] = lambda name: False
        self._ops, self._dtype = ops, dtype
        self._head: AdaptedHead | None = None
        self._layers: list[AdaptedWeights] = []
        self._stacks: dict[str, ExpertStack] = {}
        self._names: dict[str, str] = {}
        self._aliases: dict[str, str] = {}
        self._ranks: dict[int, int] = {}

    def layer(self, parts: Sequence[tuple[str, int]], n_in: int, dtype: torch.dtype | None = None) -> AdaptedLayer:
        """A linear layer of ``parts``, (projection, outputs), that adapters may change and that computes in ``dtype``,
        or the model's."""
        names, sizes = [name for name, _ in parts], [size for _, size in parts]
        op = self._ops.lora(sizes, n_in, self.n_places, dtype or self._dtype)
        self.capturable &= isinstance(op, CapturedLora)
        layer = AdaptedLayer(self, op, names, sizes, n_in)
        self._layers.append(layer)
        self._names |= {self._plain(name): name for name in names}
        return layer

    def weights(self, name: str, n_out: int, n_in: int, op: LoraPlaces) -> None:
        """A projection that is no layer by itself: ``op`` holds the updates, for whoever computes with it."""
        self.capturable = False
        self._layers.append(AdaptedWeights(op, [name], [n_out], n_in))
        self._names[self._plain(name)] = name

    def stack(self, stack: ExpertStack) -> None:
        """Experts, whose projections are layers already, that an adapter may also change as one parameter."""
        self._stacks[self._plain(stack.prefix)] = stack

    def alias(self, prefix: str, other: str) -> None:
        """Layers whose names begin with ``prefix`` may also be called by those that begin with ``other``."""
        self._aliases[self._plain(other)] = self._plain(prefix)

    def head(self, name: str, shape: tuple[int, int], n_ids: int) -> AdaptedHead:
        """The language-model head of ``shape`` (out, in), of which the first ``n_ids`` outputs are computed."""
        op = self._ops.lora([n_ids], shape[1], self.n_places, self._dtype)
        self._head = AdaptedHead(self, op, name, shape, n_ids)
        self._layers.append(self._head)
        self._names[self._plain(name)] = name
        return self._head

    def install(self, place: int, updates: Updates) -> None:
        """Make an adapter ready in a place that no row uses.

        Raises ConfigError, and changes nothing, for one that does not fit the model.
        """
        modules = self._unstacked(updates)
        rank = max((len(part.a) for part in modules.values()), default=0)
        if not 0 < rank <= MAX_RANK:
            raise ConfigError(f"the adapter has rank {rank}; ranks from 1 to {MAX_RANK} are supported")
        read = [layer.read(modules) for layer in self._layers]
        self._ranks[place] = rank
        for layer, update in zip(self._layers, read):
            layer.set(place, update)

    def _unstacked(self, updates: Updates) -> dict[str, LowRank]:
        """Those of single projections, and those of all experts of a layer by expert, by the names of the model."""
        pairs: list[tuple[str, LowRank]] = []
        stacked: dict[str, list[StackedLowRank]] = {}
        for given, part in updates.items():
            name = self._plain(given)
            # PEFT wraps one parameter around the other.
            prefix = name.removesuffix(".base_layer")
            if isinstance(part, LowRank) and name in self._names:
                pairs.append((self._names[name], part))
            elif isinstance(part, StackedLowRank) and prefix in self._stacks:
                stacked.setdefault(prefix, []).append(part)
            elif not self.ignores(f"{given}.weight"):
                raise ConfigError(f"the adapter changes {given!r}, which is no linear layer of this model")
        pairs += [pair for prefix, parts in stacked.items() for pair in self._stacks[prefix].split(parts)]
        found: dict[str, LowRank] = {}
        for name, update in pairs:
            if name in found:
                raise ConfigError(f"the adapter changes {name!r} twice")
            found[name] = update
        return found

    def _plain(self, name: str) -> str:
        """What a layer is called by all who call it by one of its names."""
        name = _ROOT.sub("", name)
        for other, own in self._aliases.items():
            if name.startswith(f"{other}."):
                return own + name.removeprefix(other)
        return name

    def clear(self, place: int) -> None:
        """Give the memory of a place back."""
        self._ranks.pop(place, None)
        for layer in self._layers:
            layer.set(place, None)

    def plan(self, places: Sequence[int], counts: Sequence[int]) -> None:
        """Tell which adapter the rows of a step have, and how many tokens each computes."""
        self.runs = self._runs(places, counts)
        self.places = self.captured = None
        if self.runs is not None:
            self.places = torch.tensor(places).repeat_interleave(torch.tensor(counts))

    def plan_head(self, places: Sequence[int]) -> None:
        """Tell which adapter the rows have whose logits are computed next."""
        changed = self._head is not None and any(place != NO_ADAPTER and self._head.changes(place) for place in places)
        self.plan(places if changed else (), [1] * len(places) if changed else ())

    def plan_captured(self, places: Tensor) -> None:
        """The same for a step of single tokens that is captured, whose ``places`` [T] are on the device."""
        self.runs, self.places, self.captured = None, None, places

    def runs_of(self, places: Sequence[int]) -> Runs | None:
        """The runs of single tokens with these places; None if none has an adapter."""
        return self._runs(places, [1] * len(places))

    def _runs(self, places: Sequence[int], counts: Sequence[int]) -> Runs | None:
        spans: list[tuple[int, int, int]] = []
        first = 0
        for place, count in zip(places, counts, strict=True):
            if place != NO_ADAPTER and spans and spans[-1][0] == place and sum(spans[-1][1:]) == first:
                spans[-1] = place, spans[-1][1], spans[-1][2] + count
            elif place != NO_ADAPTER:
                spans.append((place, first, count))
            first += count
        rank = max(self._ranks.values(), default=0)
        return Runs(spans, first, LinearParts.MOST * padded_rank(rank)) if spans else None
