"""Token embeddings."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext

Tensor = torch.Tensor


class Embedding:
    """A table [V, D] looked up by id; ``tied`` says that it is the language-model head, too."""

    def __init__(self, context: LayerContext, name: str, vocab_size: int, size: int, tied: bool) -> None:
        self.table = context.table(f"{name}.weight", (vocab_size, size), tied)

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, D], a new tensor that the caller may change."""
        return self.table.lookup(tokens)
