"""Where layers take their parameters from."""

from __future__ import annotations

from typing import Protocol

import torch

from bough.device.ops.experts import HeldWeight
from bough.device.ops.packed import PackedWeight
from bough.device.quant.base import Blocks


class TensorSource(Protocol):
    """Parameters by Hugging Face name; an open checkpoint is one."""

    def names(self) -> list[str]:
        """All parameter names."""
        ...

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new contiguous tensor, converted to ``dtype`` if given; ConfigError if there is no such parameter."""
        ...

    def blocks(self, name: str) -> Blocks | PackedWeight | HeldWeight | None:
        """A quantised parameter of two dimensions without decoding it; None if it is none."""
        ...
