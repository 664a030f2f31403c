"""Linear layers and embeddings on packed weights, of one kind or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.library import PackedLinear
from bough.device.ops.packed import PANEL, PackedWeight, view_bf16
from bough.device.ops.pages import Arena
from bough.device.ops.registry import Ops, RoundedApply
from bough.device.ops.rounded import RoundedRows
from bough.device.quant.base import LinearMethod, Parameter, RoundedMethod, Scheme, Table

Tensor = torch.Tensor

Pack = Callable[[Parameter], PackedWeight | None]
"""Reads and packs a weight; None leaves it in the model's dtype."""


class RoundedParts:
    """A :class:`bough.device.quant.base.RoundedMethod` of several side by side, which take the same."""

    def __init__(self, applies: Sequence[RoundedApply], columns: Sequence[slice]) -> None:
        """``columns`` are those of each among the outputs."""
        self.takes = applies[0].takes
        self._applies, self._columns = applies, columns

    def __call__(self, x: RoundedRows) -> Tensor:
        """[T, in] -> [T, out], a new tensor."""
        if len(self._applies) == 1:
            return self._applies[0](x)
        out = x.data.new_empty((len(x), self._columns[-1].stop), dtype=x.dtype)
        for apply, columns in zip(self._applies, self._columns):
            apply(x, out[:, columns])
        return out


class PackedMethod:
    """``x weight^T + bias`` where the outputs of several packed weights stand side by side."""

    def __init__(self, weights: Sequence[PackedWeight], bias: Tensor | None, ops: Ops) -> None:
        sizes = [weight.n_out for weight in weights]
        ends = list(accumulate(sizes))
        self._columns = [slice(end - size, end) for size, end in zip(sizes, ends)]
        biases = [None if bias is None else bias[columns] for columns in self._columns]
        self._applies = [ops.packed_linear(weight, b) for weight, b in zip(weights, biases)]
        self._n_out, self._ops = ends[-1], ops
        rounded = [a.rounded for a in self._applies if a.rounded is not None]
        alike = len(rounded) == len(self._applies) and len({a.takes for a in rounded}) == 1
        self.rounded: RoundedMethod | None = RoundedParts(rounded, self._columns) if alike else None
        self.stored: HeldWeight | None = self._applies[0].stored if len(self._applies) == 1 else None
        self.parts: Sequence[PackedLinear] = [a.packed for a in self._applies if a.packed is not None]

    def apply(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], a new tensor."""
        if self.rounded is not None:
            return self.rounded(self._ops.round_rows(x.contiguous(), self.rounded.takes))
        if len(self._applies) == 1:
            return self._applies[0](x)
        out = x.new_empty(len(x), self._n_out)
        for apply, columns in zip(self._applies, self._columns):
            apply(x, out[:, columns])
        return out


class PackedTable:
    """An embedding on a packed weight, which the head shares."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, ops: Ops) -> None:
        self.packed: PackedWeight | None = weight
        self._weight, self._dtype, self._ops = weight, dtype, ops

    def lookup(self, tokens: Tensor) -> Tensor:
        """[T] int32 ids -> [T, D] in the model's dtype."""
        return self._ops.packed_rows(self._weight, tokens, self._dtype)

    def head(self, n_ids: int) -> LinearMethod:
        """The linear layer of the first ``n_ids`` rows."""
        return PackedMethod([first_outputs(self._weight, n_ids)], None, self._ops)


class PackedScheme:
    """Weights packed one parameter at a time: ``pack`` those of the layers, ``pack_head`` embedding and head.

    What they leave is held by ``dense``, or packed as bfloat16 without it or beside packed parts of the same layer.
    """

    def __init__(self, pack: Pack, pack_head: Pack, dtype: torch.dtype, ops: Ops, dense: Scheme | None = None) -> None:
        self._pack, self._pack_head = pack, pack_head
        self._dtype, self._ops, self._dense = dtype, ops, dense
        self._arena = Arena()

    def linear(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        found = [self._pack(parameter) for parameter in parameters]
        if self._dense is not None and not any(found):
            return self._dense.linear(parameters, bias)
        weights = [weight or pack_dense(parameter) for parameter, weight in zip(parameters, found)]
        return PackedMethod(join(weights, self._arena), bias, self._ops)

    def head(self, pieces: Sequence[Parameter], n_ids: int) -> LinearMethod:
        weight = self._gathered(pieces)
        if weight is None:
            assert self._dense is not None
            return self._dense.head(pieces, n_ids)
        return PackedMethod([first_outputs(weight, n_ids)], None, self._ops)

    def table(self, pieces: Sequence[Parameter], tied: bool) -> Table:
        weight = self._gathered(pieces)
        if weight is None:
            assert self._dense is not None
            return self._dense.table(pieces, tied)
        return PackedTable(weight, self._dtype, self._ops)

    def _gathered(self, pieces: Sequence[Parameter]) -> PackedWeight | None:
        """The pieces as one weight; None where ``dense`` has to hold them."""
        found = gather(map(self._pack_head, pieces), len(pieces), self._arena)
        if found is None and self._dense is None:
            found = gather(map(pack_dense, pieces), len(pieces), self._arena)
        return found


def gather(pieces: Iterable[PackedWeight | None], n: int, arena: Arena) -> PackedWeight | None:
    """``n`` pieces of a weight, of which none but the last is smaller than the first, as one in the arena; one at a
    time is held beside it. None where one of them is None, or of another kind than the others."""
    whole: PackedWeight | None = None
    rooms: list[Tensor | None] = []
    end = n_out = 0
    for piece in pieces:
        if piece is None or (whole is not None and (piece.kind, piece.group) != (whole.kind, whole.group)):
            return None
        parts = piece.weight, piece.scale, piece.sub
        if whole is None:
            rooms = [None if part is None else arena.room(n * len(part), part) for part in parts]
            assert rooms[0] is not None
            whole = replace(piece, weight=rooms[0], scale=rooms[1], sub=rooms[2])  # nothing of the piece is kept
        for room, part in zip(rooms, parts):
            if room is not None and part is not None:
                room[end : end + len(part)] = part
        end, n_out = end + len(piece.weight), n_out + piece.n_out
        del piece, parts, part
    assert whole is not None
    weight, scale, sub = (None if room is None else room[:end] for room in rooms)
    assert weight is not None
    return replace(whole, n_out=n_out, weight=weight, scale=scale, sub=sub)


def pack_dense(parameter: Parameter) -> PackedWeight:
    """bfloat16, whatever the checkpoint holds, to be copied by :func:`join` or :func:`gather`."""
    return view_bf16(parameter.dense().bfloat16())


def join(weights: Sequence[PackedWeight], arena: Arena) -> list[PackedWeight]:
    """Copies in the arena; neighbours of one kind as one weight, where the first of them fills its panels."""
    runs = [[weights[0]]]
    for weight in weights[1:]:
        last = runs[-1][-1]
        if (last.kind, last.group) == (weight.kind, weight.group) and last.n_out % PANEL == 0:
            runs[-1].append(weight)
        else:
            runs.append([weight])
    return [
        replace(
            run[0],
            n_out=sum(weight.n_out for weight in run),
            weight=arena.join([weight.weight for weight in run]),
            scale=_joined([weight.scale for weight in run], arena),
            sub=_joined([weight.sub for weight in run], arena),
        )
        for run in runs
    ]


def _joined(tensors: Sequence[Tensor | None], arena: Arena) -> Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return arena.join(found) if found else None


def first_outputs(weight: PackedWeight, n: int) -> PackedWeight:
    """The first ``n`` outputs, on the same memory."""
    count = -(-n // PANEL)
    parts = (None if t is None else t[:count] for t in (weight.weight, weight.scale, weight.sub))
    packed, scale, sub = parts
    assert packed is not None
    return replace(weight, n_out=n, weight=packed, scale=scale, sub=sub)
