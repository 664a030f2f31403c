"""What layers are built with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bough.base.errors import ConfigError
from bough.device.attention.base import AttentionBackend
from bough.device.layers.source import TensorSource
from bough.device.lora.pool import AdaptedLayer, AdapterPool
from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import PackedWeight
from bough.device.ops.registry import Ops
from bough.device.quant.base import Blocks, LinearMethod, Parameter, Scheme, Table

Tensor = torch.Tensor

PIECE = 1 << 11
"""Rows of an embedding or a head that are read at a time: whole panels of packed weights, and few enough that the
allocator takes the memory of one for the next one."""


class LayerContext:
    """Parameters, ops and the form of the weights of one model.

    Attributes:
        ops: the registered ops.
        attention: writes and reads the KV; planned once per step by whoever runs the model. An encoder brings its own.
        adapters: the low-rank updates that rows may have; None: no row has any.
        dtype, device: of parameters and compute.
        n_parameters: values read so far.
        routed: it has experts, of which a token uses a few.
        capturable: a step of the model can be captured: nothing in it asks the device for a number.
    """

    def __init__(
        self,
        source: TensorSource,
        ops: Ops,
        scheme: Scheme,
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.ops = ops
        self.adapters = adapters
        self._scheme = scheme
        self.attention = attention
        self.n_parameters = 0
        self.routed = False
        self.capturable = True
        self.device = device
        self._source, self.dtype = source, dtype
        self._unread = dict.fromkeys(source.names())

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Read a parameter, in ``dtype`` or the model's.

        Raises ConfigError if it is missing or its shape is not the one that the config implies.
        """
        tensor = self._source.tensor(name, dtype or self.dtype)
        _check_shape(name, tuple(tensor.shape), shape)
        self._count(name, shape)
        return tensor.to(self.device)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a parameter ``name`` that was not read yet."""
        return name in self._unread

    def names(self) -> list[str]:
        """The parameters that were not read yet."""
        return list(self._unread)

    def stored(self, name: str) -> Tensor:
        """A parameter of any shape, in the dtype that it is stored in; not counted as read."""
        return self._source.tensor(name)

    def linear(self, parts: Sequence[tuple[str, int]], in_features: int, bias: Tensor | None) -> LinearMethod:
        """The layer that stacks the weights of ``parts``, (parameter name, output features), and its bias.

        Raises ConfigError as :meth:`parameter` does.
        """
        return self.linear_of([self._weight(name, (rows, in_features)) for name, rows in parts], bias)

    def linear_of(self, parameters: Sequence[Parameter], bias: Tensor | None) -> LinearMethod:
        """The layer that stacks weights, for those that are no parameters by themselves."""
        return self._scheme.linear(parameters, bias)

    def adapted(
        self, parts: Sequence[tuple[str, int]], in_features: int, dtype: torch.dtype | None = None
    ) -> AdaptedLayer | None:
        """What adapters may add to a layer of ``parts``, (projection, output features), that computes in ``dtype``, or
        the model's; None where there are none."""
        return None if self.adapters is None else self.adapters.layer(parts, in_features, dtype)

    def head(self, name: str, shape: tuple[int, int], n_ids: int) -> LinearMethod:
        """The first ``n_ids`` outputs of a language-model head of ``shape`` (out, in); ConfigError as above."""
        return self._scheme.head(self._pieces(name, shape), n_ids)

    def table(self, name: str, shape: tuple[int, int], tied: bool) -> Table:
        """An embedding of ``shape`` (ids, size), ``tied`` if it is the head, too; ConfigError as above."""
        return self._scheme.table(self._pieces(name, shape), tied)

    def _pieces(self, name: str, shape: tuple[int, int]) -> Sequence[Parameter]:
        """A weight that may be most of a small model, by rows: beside what becomes of it, one piece is in memory."""
        self._count(name, shape)
        found = self._source.shape(name)
        if found is None or shape[0] <= PIECE:
            return [_Weight(self._source, name, shape, self.dtype, self.device)]
        _check_shape(name, found, shape)
        ends = [*range(PIECE, shape[0], PIECE), shape[0]]
        rows = [slice(begin, end) for begin, end in zip([0, *ends], ends)]
        return [
            _Weight(self._source, name, (part.stop - part.start, shape[1]), self.dtype, self.device, part)
            for part in rows
        ]

    def _weight(self, name: str, shape: tuple[int, int]) -> Parameter:
        self._count(name, shape)
        return _Weight(self._source, name, shape, self.dtype, self.device)

    def _count(self, name: str, shape: tuple[int, ...]) -> None:
        self._unread.pop(name, None)
        self.n_parameters += math.prod(shape)

    def check_all_read(self, ignored: Callable[[str], bool]) -> None:
        """ConfigError if the checkpoint holds parameters that nothing used and that ``ignored`` does not know.

        A model that leaves some of its weights out would run, and talk nonsense.
        """
        unread = [name for name in self._unread if not ignored(name)]
        if unread:
            shown = ", ".join(unread[:3])
            raise ConfigError(f"the checkpoint has {len(unread)} parameters of no known use, such as {shown}")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A :class:`bough.device.quant.base.Parameter` of a checkpoint."""

    source: TensorSource
    name: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    rows: slice | None = None

    def dense(self) -> Tensor:
        tensor = self.source.tensor(self.name, self.dtype, self.rows)
        _check_shape(self.name, tuple(tensor.shape), self.shape)
        return tensor.to(self.device)

    def blocks(self) -> Blocks | PackedWeight | HeldWeight | None:
        found = self.source.blocks(self.name, self.rows)
        if isinstance(found, HeldWeight):
            _check_shape(self.name, tuple(found.weight.shape), self.shape)
            assert found.scale is not None
            return replace(found, weight=found.weight.to(self.device), scale=found.scale.to(self.device))
        if found is not None:
            n_out = found.n_out if isinstance(found, PackedWeight) else len(found.rows)
            _check_shape(self.name, (n_out, found.n_in), self.shape)
            found = _moved(found, self.device)
        return found


def _moved(held: Blocks | PackedWeight, device: torch.device) -> Blocks | PackedWeight:
    if isinstance(held, Blocks):
        return replace(held, rows=held.rows.to(device))
    scale, sub = (None if t is None else t.to(device) for t in (held.scale, held.sub))
    return replace(held, weight=held.weight.to(device), scale=scale, sub=sub)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise ConfigError(f"parameter {name!r} has shape {list(found)}; the config says {list(expected)}")
