"""Low-rank updates of linear layers (LoRA, Hu et al. 2021), of different adapters in one batch.

Shapes: T tokens of a step, R rank of an adapter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from bough.device.ops.library import LinearParts, LoraAdapter, LoraCall, LoraRun, LoraRuns, LoraTable
from bough.device.ops.packed import PANEL, PackedWeight, view_bf16
from bough.device.ops.pages import HUGE_PAGE, Arena
from bough.device.ops.parts import describe

Tensor = torch.Tensor


class Runs:
    """Which tokens of a step have which adapter.

    A run is tokens of one adapter, the same distance apart.

    Attributes:
        spans: (place, first token, tokens, distance) of each run, by place; at most 48 tokens each.
        address: of the description that kernels read, and of the room that they need; valid as long as this lives.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int]], n_tokens: int, inner_size: int) -> None:
        """``spans`` are (place, first token, tokens) of neighbours, of any number; ``inner_size`` bounds parts times
        padded rank of any layer."""
        self.spans = _runs(spans)
        self._runs = (LoraRun * len(self.spans))(*(LoraRun(*span) for span in self.spans))
        self._room = torch.empty(n_tokens, inner_size, dtype=torch.bfloat16)
        room = self._room.data_ptr()
        self._described = LoraRuns(ctypes.addressof(self._runs), len(self.spans), room, inner_size)
        self.address = ctypes.addressof(self._described)


def _runs(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """The runs of ``spans``: long ones cut, and single tokens of one adapter joined where they lie evenly apart."""
    most = LoraRun.MOST_ROWS
    runs: list[tuple[int, int, int, int]] = []
    for place, begin, total in sorted(spans):
        for first in range(begin, begin + total, most):
            count = min(most, begin + total - first)
            if runs and count == 1 and runs[-1][0] == place and runs[-1][2] < most:
                _, before, n, step = runs[-1]
                if n == 1 or first == before + n * step:
                    runs[-1] = place, before, n + 1, first - before if n == 1 else step
                    continue
            runs.append((place, first, count, 1))
    return runs


@dataclass(frozen=True, slots=True)
class Update:
    """What one adapter adds to one layer: ``x a^T`` [T, parts * R], of which each part has R, times its b^T.

    Attributes:
        a: [R, n_in] of each part; None where the adapter leaves it alone.
        b: [outputs of the part, R], the adapter's scale multiplied in.
    """

    a: Sequence[Tensor | None]
    b: Sequence[Tensor | None]

    @property
    def rank(self) -> int:
        """The largest of the parts'."""
        return max(a.shape[0] for a in self.a if a is not None)


class LoraPlaces(Protocol):
    """The updates of one weight, for each place that an adapter can have."""

    def set(self, place: int, update: Update | None) -> None:
        """Put an adapter's update in a place, or take it away. No step may be using the place."""
        ...


class LoraOp(LoraPlaces, Protocol):
    """Those of a linear layer.

    Attributes:
        address: of the table that kernels read; None where there is none.
    """

    address: int | None

    def __call__(self, runs: Runs, x: Tensor, out: Tensor) -> None:
        """Add the updates of the tokens of ``runs``, of x [T, n_in], to out [T, n_out], both contiguous."""
        ...


@runtime_checkable
class CapturedLora(Protocol):
    """A :class:`LoraOp` that steps of single tokens can be captured with."""

    def add(self, places: Tensor, x: Tensor, out: Tensor) -> None:
        """As :meth:`LoraOp.__call__` for ``places`` [T] int32 on the device, those of the tokens' adapters, or
        NO_ADAPTER. What is launched depends on no number there, and on no adapter."""
        ...


class DenseLora:
    """:class:`LoraOp` in separate products, of any dtype."""

    def __init__(
        self, linear: Callable[[Tensor, None], Callable[[Tensor], Tensor]], sizes: Sequence[int], dtype: torch.dtype
    ) -> None:
        """``linear`` is that of the ops, ``sizes`` the outputs of the layer's parts."""
        self.address: int | None = None
        self._linear, self._dtype = linear, dtype
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        self._columns = [slice(end - size, end) for size, end in zip(sizes, ends)]
        self._places: dict[int, list[tuple[slice, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]] = {}

    def set(self, place: int, update: Update | None) -> None:
        self._places[place] = [
            (columns, self._linear(a.to(self._dtype), None), self._linear(b.to(self._dtype), None))
            for columns, a, b in (zip(self._columns, update.a, update.b) if update else ())
            if a is not None and b is not None
        ]

    def __call__(self, runs: Runs, x: Tensor, out: Tensor) -> None:
        for place, first, count, step in runs.spans:
            rows = slice(first, first + count * step, step)
            for columns, a, b in self._places.get(place, ()):
                out[rows, columns] += b(a(x[rows].contiguous()))


class PackedLora:
    """:class:`LoraOp` by a kernel, in bfloat16 with sums in float32."""

    def __init__(
        self, function: Callable[..., None], sizes: Sequence[int], n_in: int, n_places: int, arena: Arena
    ) -> None:
        """``arena`` holds the updates: those of all layers of an adapter are read in the order they were set in."""
        self._function, self._sizes, self._n_in, self._arena = function, list(sizes), n_in, arena
        self._adapters = (ctypes.c_void_p * n_places)()
        self._kept: list[tuple[LoraAdapter, list[PackedWeight]] | None] = [None] * n_places
        padded = [*self._sizes, *[0] * (LinearParts.MOST - len(sizes))]
        self._table = LoraTable(
            ctypes.addressof(self._adapters), len(sizes), (ctypes.c_int64 * LinearParts.MOST)(*padded)
        )
        self.address: int | None = ctypes.addressof(self._table)

    def set(self, place: int, update: Update | None) -> None:
        if update is None:
            self._adapters[place], self._kept[place] = None, None
            return
        rank = padded_rank(update.rank)
        a = torch.zeros(len(update.a), rank, self._n_in, dtype=torch.bfloat16)
        adapter, weights = LoraAdapter(), []
        for i, (part_a, part_b) in enumerate(zip(update.a, update.b)):
            if part_a is None or part_b is None:
                continue
            a[i, : len(part_a)] = part_a
            b = torch.zeros(len(part_b), rank, dtype=torch.bfloat16)
            b[:, : part_b.shape[1]] = part_b
            weights.append(self._packed(b))
            adapter.b[i] = describe(weights[-1])
        weights.append(self._packed(a.flatten(0, 1)))
        adapter.a = describe(weights[-1])
        self._kept[place] = adapter, weights
        self._adapters[place] = ctypes.addressof(adapter)

    def _packed(self, weight: Tensor) -> PackedWeight:
        packed = view_bf16(weight)
        return replace(packed, weight=self._arena.join([packed.weight]))

    def __call__(self, runs: Runs, x: Tensor, out: Tensor) -> None:
        fits = x.shape[1:] == (self._n_in,) and out.shape == (len(x), sum(self._sizes))
        if not (fits and x.dtype == out.dtype == torch.bfloat16 and x.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"the update of a layer cannot take {x.dtype} {list(x.shape)} and {list(out.shape)}")
        call = LoraCall(
            self.address, runs.address, x.data_ptr(), out.data_ptr(), self._n_in, out.shape[1],
            torch.get_num_threads(),
        )  # fmt: skip
        self._function(ctypes.byref(call))


def adapter_arena() -> Arena:
    """For the updates of adapters that come and go: chunks so small that few adapters share one."""
    return Arena(2 * HUGE_PAGE)


def padded_rank(rank: int) -> int:
    """Inner values of a part as kernels hold them."""
    return -(-rank // PANEL) * PANEL


def packable(sizes: Sequence[int], n_in: int, dtype: torch.dtype) -> bool:
    """Whether :class:`PackedLora` can take a layer."""
    return dtype == torch.bfloat16 and n_in % 2 == 0 and len(sizes) <= LinearParts.MOST
