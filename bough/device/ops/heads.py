"""What differs between attention layers: how queries and keys are made, and how scores become weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.base.plan import first_seen

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norms of each query and each key, before they are rotated.

    Attributes:
        q, k: weights [D], both in the dtype of the heads or both float32 (see :meth:`Ops.rms_norm`).
        eps: of the norms.
    """

    q: Tensor
    k: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's projected tokens [T, (H + 2 KH) * D] divide into queries, keys and values.

    Attributes:
        n_heads, n_kv_heads: H and KH; query head h reads key-value head h // (H / KH).
        dim: D.
        interleaved: rotary dimension 2i is paired with 2i + 1, instead of i with i + R / 2.
        norm: of queries and keys, if there is one.
    """

    n_heads: int
    n_kv_heads: int
    dim: int
    interleaved: bool = False
    norm: HeadNorm | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the products of a query with the keys become weights.

    Attributes:
        scale: factor of the products.
        softcap: c of the scores' bound ``c * tanh(score / c)`` (Gemma 2); 0: none.
        window: positions that a query sees, its own included; 0: all up to its own.
        chunked: a query sees those from the last multiple of ``window`` on instead (Llama 4).
        sinks: [H] float32, one more score for each head, whose weight goes to no value (gpt-oss); None: none.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: Tensor | None = None
    chunked: bool = False

    def first_seen(self, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        return max(0, first_seen(position, self.window, self.chunked)) if self.window else 0
