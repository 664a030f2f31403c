"""What layers are built with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.base.errors import ConfigError
from bough.device.attention.base import AttentionBackend
from bough.device.layers.source import TensorSource
from bough.device.ops.registry import Ops
from bough.device.quant.base import LinearMethod

Tensor = torch.Tensor


class LayerContext:
    """Parameters, ops and the linear method of one model.

    Attributes:
        ops: the registered ops.
        linear: (weight [out, in], bias [out] or None) -> the method that owns them from then on.
        attention: writes and reads the KV; planned once per step by whoever runs the model. An encoder brings its own.
        dtype, device: of parameters and compute.
        n_parameters: values read so far.
    """

    def __init__(
        self,
        source: TensorSource,
        ops: Ops,
        linear: Callable[[Tensor, Tensor | None], LinearMethod],
        attention: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.ops = ops
        self.linear = linear
        self.attention = attention
        self.n_parameters = 0
        self.device = device
        self._source, self.dtype = source, dtype
        self._unread = dict.fromkeys(source.names())

    def parameter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a parameter; ConfigError if it is missing or its shape is not the one that the config implies."""
        tensor = self._source.tensor(name, self.dtype)
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"parameter {name!r} has shape {list(tensor.shape)}; the config says {list(shape)}")
        self._unread.pop(name, None)
        self.n_parameters += tensor.numel()
        return tensor.to(self.device)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a parameter ``name`` that was not read yet."""
        return name in self._unread

    def check_all_read(self, ignored: Callable[[str], bool]) -> None:
        """ConfigError if the checkpoint holds parameters that nothing used and that ``ignored`` does not know.

        A model that leaves some of its weights out would run, and talk nonsense.
        """
        unread = [name for name in self._unread if not ignored(name)]
        if unread:
            shown = ", ".join(unread[:3])
            raise ConfigError(f"the checkpoint has {len(unread)} parameters of no known use, such as {shown}")
