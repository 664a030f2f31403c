"""Token embeddings."""

from __future__ import annotations

import torch

from bough.device.layers.context import LayerContext

Tensor = torch.Tensor


class Embedding:
    """A table [V, D] looked up by id."""

    def __init__(self, context: LayerContext, name: str, vocab_size: int, size: int) -> None:
        self.weight = context.parameter(f"{name}.weight", (vocab_size, size))

    def __call__(self, tokens: Tensor) -> Tensor:
        """[T] ids -> [T, D], a new tensor that the caller may change."""
        return torch.nn.functional.embedding(tokens, self.weight)
