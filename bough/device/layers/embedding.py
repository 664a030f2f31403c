"""Token embeddings."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext
from bough.device.ops.packed import PackedWeight

Tensor = torch.Tensor


class Embedding:
    """A table [V, D] looked up by id; ``tied`` says that it is the language-model head, too."""

    def __init__(
        self, context: LayerContext, name: str, vocab_size: int, size: int, tied: bool, scale: float = 1.0
    ) -> None:
        """``scale``, rounded to the model's dtype, multiplies what is looked up."""
        self._scale = torch.tensor(scale, dtype=context.dtype).item()
        self.table = context.table(f"{name}.weight", (vocab_size, size), tied)

    @property
    def packed(self) -> PackedWeight | None:
        """The table, where a kernel that looks it up does all there is to do."""
        return self.table.packed if self._scale == 1.0 else None

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, D], a new tensor that the caller may change."""
        found = self.table.lookup(tokens)
        return found if self._scale == 1.0 else found.mul_(self._scale)
