"""A mixture of experts in one call: the gated feed-forward layers that each token chose, weighted and summed up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from bough.device.ops.library import Expert, ExpertsCall, PackedLinear
from bough.device.ops.parts import linear_parts, pairable, takeable

Tensor = torch.Tensor


INPUTS = 128
"""Inputs that kernels for weights of 8 bits take at a time; scales of blocks are of as many, or a multiple."""


@dataclass(frozen=True, slots=True)
class HeldWeight:
    """The weight [out, in] of a linear layer as a device holds it, for kernels that multiply with many at once.

    Attributes:
        weight: in the model's dtype; or int8 or float8_e4m3fn [out, in], for inputs that are rounded to the same; or
            uint8 [out, bytes of an output], for inputs as they are.
        bias: [out] or None.
        scale: of int8 and float8_e4m3fn float32 [out, blocks of inputs], of bytes float16 [groups of inputs, out].
        offset: of bytes float16 [groups of inputs, out]: a weight is ``q * scale + offset``.
        group: inputs that share a scale, unless all of an output do.
        form: of what bytes hold: integers of 4 or 8 bits, or 4-bit floats.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    offset: Tensor | None = None
    group: int = 0
    form: Literal["4", "8", "fp4"] | None = None

    def alike(self, other: HeldWeight) -> bool:
        """Whether a kernel can take both as one."""
        mine, others = (
            (s.weight.shape, s.weight.dtype, s.bias is None, s.group, s.form, s.scale is None or s.scale.shape)
            for s in (self, other)
        )
        return mine == others


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The weights of one expert, whose outputs lie side by side: gates, then values; and of the way down.

    Attributes:
        gate_up, down: packed; empty where they are not.
        stored: the same two as the device holds them; None where they are held otherwise.
    """

    gate_up: Sequence[PackedLinear]
    down: Sequence[PackedLinear]
    stored: tuple[HeldWeight, HeldWeight] | None = None


ExpertsOp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, D], ids [T, k] int32, different experts of each token, and weights [T, k] float32 -> [T, D], where the weighted
outputs are summed up in float32 in the order of ``ids``."""


@dataclass(frozen=True, slots=True)
class Clamp:
    """The activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``, where gate is at most ``limit`` and up
    between ``-limit`` and ``limit``."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, 2 I] = gates, then values -> [T, I], computed in float32."""
        gate, up = x.float().chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * (gate * torch.sigmoid(self.alpha * gate))).to(x.dtype)


class FusedExperts:
    """All experts of one layer. A token's result does not depend on the others, bit by bit."""

    def __init__(
        self,
        function: Callable[..., None],
        experts: Sequence[ExpertParts],
        sizes: tuple[int, int],
        clamp: Clamp | None,
    ) -> None:
        """``function`` is the kernel, ``sizes`` hidden and inner size."""
        self._function = function
        self._kept = list(experts)
        self._hidden_size, inner_size = sizes
        self._experts = (Expert * len(experts))(
            *(Expert(linear_parts(expert.gate_up), linear_parts(expert.down)) for expert in experts)
        )
        self._call = ExpertsCall(
            experts=ctypes.addressof(self._experts), n_experts=len(experts), hidden_size=self._hidden_size,
            inner_size=inner_size, alpha=clamp.alpha if clamp else 0, limit=clamp.limit if clamp else 0,
        )  # fmt: skip

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See :data:`ExpertsOp`. ValueError for what does not fit."""
        fits = (
            x.shape[1:] == (self._hidden_size,)
            and ids.shape == weights.shape == (len(x), ids.shape[-1])
            and x.dtype in _DTYPES
            and (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
            and all(t.is_contiguous() for t in (x, ids, weights))
        )
        if not fits or (ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(self._experts)):
            raise ValueError(f"{len(self._experts)} experts cannot take {x.shape}, {ids.shape} and {weights.shape}")
        out = torch.empty_like(x)
        call = self._call
        call.x, call.ids, call.weights, call.out = (t.data_ptr() for t in (x, ids, weights, out))
        call.n_tokens, call.top_k = ids.shape
        call.threads = torch.get_num_threads()
        self._function(_DTYPES[x.dtype], ctypes.byref(call))
        return out


_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def fusable(experts: Sequence[ExpertParts], inner_size: int) -> bool:
    """Whether the kernel can compute these experts."""
    return all(
        takeable(expert.gate_up) and takeable(expert.down) and pairable(expert.gate_up, inner_size)
        for expert in experts
    )
