"""What the worker needs of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from bough.base.messages import CacheKind
from bough.device.layers.context import LayerContext
from bough.device.ops.cells import Cells
from bough.device.ops.decode import Decoded

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What one layer keeps of a token.

    Attributes:
        n_heads: key-value heads.
        key_dim, value_dim: numbers of each; no values where they are a part of the keys (a latent).
        window: positions that a token sees, its own included, so that older KV is never read again; 0: all of them.
        chunked: it sees those from the last multiple of ``window`` on instead.
    """

    n_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    chunked: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values in ``dtype``; int8 has a float32 scale per head of either."""
        scale = 4 if dtype == torch.int8 else 0
        return sum(self.n_heads * (dim * dtype.itemsize + scale) for dim in (self.key_dim, self.value_dim) if dim)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's KV looks like. A model says what it computes; the pool may hold another dtype."""

    layers: tuple[CacheSpec, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes over all layers."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers)

    @property
    def window_bytes_per_token(self) -> int:
        """Bytes over the layers that see a window."""
        return sum(layer.bytes_per_token(self.dtype) for layer in self.layers if layer.window)

    @property
    def window(self) -> int:
        """The widest window of a layer, 0 if none sees one."""
        return max((layer.window for layer in self.layers), default=0)

    @property
    def chunked(self) -> bool:
        """All layers that see a window see the same chunks; otherwise :attr:`window` covers what each of them sees."""
        kinds = {(layer.window, layer.chunked) for layer in self.layers if layer.window}
        return len(kinds) == 1 and all(chunked for _, chunked in kinds)

    def kinds(self, tokens: int, window_tokens: int | None) -> tuple[CacheKind, ...]:
        """The layers by what they keep, in pools of so many cells."""
        found: dict[tuple[Literal["full", "window", "chunk", "latent"], int], list[CacheSpec]] = {}
        for layer in self.layers:
            if layer.window and window_tokens is not None:
                found.setdefault(("chunk" if layer.chunked else "window", layer.window), []).append(layer)
            else:
                found.setdefault(("full" if layer.value_dim else "latent", 0), []).append(layer)
        return tuple(
            CacheKind(
                kind=kind,
                layers=len(layers),
                tokens=window_tokens if window and window_tokens is not None else tokens,
                bytes_per_token=sum(layer.bytes_per_token(self.dtype) for layer in layers),
                window=window,
            )
            for (kind, window), layers in found.items()
        )


class Model(Protocol):
    """One architecture; the file that defines it is named after its ``model_type``.

    Attributes:
        kv_shape: what it keeps per token.
        vocab_size: how many ids have a logit.
        causal: tokens attend to what is before them, so that a sequence may be computed in steps. Otherwise it is
            computed in one, and nothing is generated.
        labels: of a classifier, whose head gives them scores and no token a logit; empty for other models.
    """

    kv_shape: KVShape
    vocab_size: int
    causal: bool
    labels: tuple[str, ...]

    def __init__(self, config: Mapping[str, Any], context: LayerContext, n_ids: int, n_positions: int) -> None:
        """Read the parameters.

        Args:
            config: the Hugging Face config.
            context: parameters, ops, linear method, attention.
            n_ids: ids that the tokenizer knows; larger ones get no logits.
            n_positions: positions that may occur.

        Raises ConfigError for a config or a checkpoint that this architecture cannot serve.
        """
        ...

    def forward(self, tokens: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Tensor:
        """``tokens`` [T] int32 -> last hidden states [T, D], normalised.

        Writes the new tokens' KV into ``k`` and ``v`` ([N, KH, D] per layer, as ``kv_shape`` says), as the attention
        backend was planned.
        """
        ...

    def decode(self, tokens: Tensor, last: Tensor, k: Sequence[Cells], v: Sequence[Cells]) -> Decoded | None:
        """``forward`` and ``logits`` of ``tokens`` [B], one of each row, and the likeliest ids, where that is done in
        one go; None where it is not. The ids are noted in ``last`` [n_rows] int32, whose indices are the rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, vocab_size]."""
        ...

    def scores(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, labels], of a classifier."""
        ...


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of a config whose architecture is for sequence classification; empty for others.

    A config that tells none has two, as in transformers.
    """
    if not any("ForSequenceClassification" in str(name) for name in config.get("architectures") or ()):
        return ()
    named = config.get("id2label") or {}
    n_labels = len(named) or config.get("num_labels") or 2
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(n_labels))
