"""Attention and feed-forward layer around one residual stream, in the orders that decoders have them.

What a sublayer adds is added by the norm that follows it, in one op. So a block takes what the one before left to be
added, and leaves what its last sublayer gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from bough.device.layers.attention import Attention
from bough.device.layers.mlp import GatedMLP
from bough.device.layers.norm import Norm, RMSNorm, normed
from bough.device.ops.cells import Cells
from bough.device.ops.rounded import Rows
from bough.device.ops.stack import StackedLayer

Tensor = torch.Tensor


class Mixer(Protocol):
    """Attention of whatever kind.

    Attributes:
        takes: what x may come rounded to; None: it comes as it is.
    """

    takes: torch.dtype | None

    def __call__(self, x: Any, k_cache: Cells, v_cache: Cells) -> Tensor:
        """x [T, D], :data:`bough.device.ops.rounded.Rows`, and the layer's caches -> [T, D]."""
        ...


class FeedForward(Protocol):
    """The other sublayer.

    Attributes:
        takes: what x may come rounded to; None: it comes as it is.
    """

    takes: torch.dtype | None

    def __call__(self, x: Any) -> Tensor:
        """x [T, D], :data:`bough.device.ops.rounded.Rows` -> [T, D]."""
        ...


class Norms(NamedTuple):
    """The norms of one sublayer, of what goes in and of what comes out; None: none."""

    before: Norm | None = None
    after: Norm | None = None


class Block:
    """Attention, then feed-forward: pre-norm (Llama), post-norm (OLMo 2), or both (Gemma 2)."""

    def __init__(
        self, attention: Mixer, attention_norms: Norms, mlp: FeedForward, mlp_norms: Norms, scale: float = 1.0
    ) -> None:
        """``scale`` multiplies what either adds to the residual stream."""
        self._attention, self._attention_norms = attention, attention_norms
        self._mlp, self._mlp_norms = mlp, mlp_norms
        self._scale = scale

    def __call__(self, x: Tensor | None, residual: Tensor, k: Cells, v: Cells) -> Tensor:
        """What is still to be added to ``residual`` [T, D], given ``x``, what the block before left to be added."""
        x = self._attention(_enter(self._attention_norms.before, x, residual, self._attention.takes), k, v)
        x = self._leave(self._attention_norms.after, x)
        x = self._mlp(_enter(self._mlp_norms.before, x, residual, self._mlp.takes))
        return self._leave(self._mlp_norms.after, x)

    def _leave(self, norm: Norm | None, x: Tensor) -> Tensor:
        x = x if norm is None else norm(x)
        return x if self._scale == 1.0 else x * self._scale

    def stacked(self) -> StackedLayer | None:
        """The block as the op that computes all of them takes it; None where it computes something else."""
        attention, mlp = self._attention, self._mlp
        if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP) or not attention.direct:
            return None
        weights: list[Tensor | None] = []
        for norm in (*self._attention_norms, *self._mlp_norms):
            if norm is not None and not isinstance(norm, RMSNorm):
                return None
            weights.append(None if norm is None else norm.weight)
        adapted = (linear.adapted for linear in (attention.qkv, attention.out, mlp.gate_up, mlp.down))
        return StackedLayer(
            attention_norm=weights[0],
            attention_after=weights[1],
            mlp_norm=weights[2],
            mlp_after=weights[3],
            qkv=attention.qkv.parts,
            out=attention.out.parts,
            gate_up=mlp.gate_up.parts,
            down=mlp.down.parts,
            heads=attention.heads,
            scoring=attention.scoring,
            rotary=attention.rotary,
            adapted=[layer.op for layer in adapted if layer is not None],
        )


class ParallelBlock:
    """Attention and feed-forward side by side behind one norm (Cohere)."""

    def __init__(self, norm: Norm, attention: Mixer, mlp: FeedForward) -> None:
        self._norm, self._attention, self._mlp = norm, attention, mlp
        self._takes = attention.takes if attention.takes == mlp.takes else None

    def __call__(self, x: Tensor | None, residual: Tensor, k: Cells, v: Cells) -> Tensor:
        """As :meth:`Block.__call__`."""
        entering = _enter(self._norm, x, residual, self._takes)
        return self._attention(entering, k, v) + self._mlp(entering)

    def stacked(self) -> StackedLayer | None:
        """None: no op computes all of them."""
        return None


def _enter(norm: Norm | None, x: Tensor | None, residual: Tensor, takes: torch.dtype | None) -> Rows:
    """``residual += x``, if there is anything to add; its norm as a sublayer ``takes`` it, or itself where there is no
    norm."""
    if norm is None:
        if x is not None:
            residual += x
        return residual
    return normed(norm, residual, None, takes) if x is None else normed(norm, x, residual, takes)
