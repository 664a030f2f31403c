"""The ops by Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from bough.base.plan import SharedPrefix
from bough.device.attention.work import HostBatch, plan_work
from bough.device.ops.cells import Cells
from bough.device.ops.experts import Clamp, ExpertParts, ExpertsOp
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Scoring
from bough.device.ops.lora import LoraOp
from bough.device.ops.packed import PackedWeight
from bough.device.ops.quantise import quantise
from bough.device.ops.registry import PackedApply
from bough.device.ops.stack import LayerStack, StackedLayer, StackShape
from bough.device.ops.triton import attention, elementwise, linear, rope, sampling
from bough.device.ops.triton.experts import GroupedExperts
from bough.device.ops.triton.lora import TritonLora
from bough.device.platform.copies import to_device

Tensor = torch.Tensor


class TritonOps:
    """:class:`bough.device.ops.registry.Ops` on CUDA, and on the CPU where Triton interprets.

    float16 is computed in, too. Products are those of the tensor cores: a row's result does not depend on the rows
    beside it, but for which instruction a tile is multiplied with, and cuBLAS's choices in ``linear``; so results agree
    within rounding, not bit for bit. Weights of integers in groups are widened and multiplied with inputs as they are,
    which is closer to the exact product than the specification's rounded inputs.
    """

    name = "triton"

    rope_kv_write = staticmethod(rope.rope_kv_write)
    argmax = staticmethod(sampling.argmax)
    apply_bitmask = staticmethod(sampling.apply_bitmask)
    penalise = staticmethod(sampling.penalise)
    sample = staticmethod(sampling.sample)
    logprobs = staticmethod(sampling.logprobs)
    packed_rows = staticmethod(linear.packed_rows)
    fp8_linear = staticmethod(linear.fp8_linear)
    quantise = staticmethod(quantise)
    round_rows = staticmethod(elementwise.round_rows)
    rms_norm_rounded = staticmethod(elementwise.rms_norm_rounded)
    gated_rounded = staticmethod(elementwise.gated_rounded)

    def __init__(self, device: torch.device, reason: str) -> None:
        """``device`` is where weights go."""
        self.reason = reason
        self._device = device

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, residual, weight, eps)

    def silu_mul(self, x: Tensor) -> Tensor:
        return elementwise.gated(x, gelu=False)

    def gelu_mul(self, x: Tensor) -> Tensor:
        return elementwise.gated(x, gelu=True)

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        page_table: Tensor,
        rows: Tensor,
        q_start: Tensor,
        seq_len: Tensor,
        scoring: Scoring,
        groups: SharedGroups | None = None,
    ) -> Tensor:
        """Waits for the indices, to plan with them; :class:`bough.device.attention.triton.TritonAttention` plans
        without the device, once per step."""
        tiles = attention.tiles_for(q, k_cache, v_cache)
        batch = HostBatch(rows.cpu().numpy(), q_start.cpu().numpy(), seq_len.cpu().numpy(), _shared(groups))
        work = plan_work(batch, tiles, scoring.window, scoring.chunked)
        array = to_device(work.array, q.device)
        return attention.attend(q, k_cache, v_cache, page_table, array, work.sizes, scoring)

    def masked_argmax(self, logits: Tensor, masks: Tensor, rows: Tensor, tokens: Tensor) -> None:
        chosen = logits[rows]
        self.apply_bitmask(chosen, masks, torch.arange(len(rows), device=logits.device))
        tokens[rows] = self.argmax(chosen).where(tokens[rows] >= 0, -1)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(_linear, weight.to(self._device), bias)

    def suited(self, weight: PackedWeight) -> PackedWeight:
        return weight

    def packed_linear(self, weight: PackedWeight, bias: Tensor | None) -> PackedApply:
        return linear.packed_linear(weight, bias, self._device)

    def layer_stack(self, layers: Sequence[StackedLayer], final_norm: Tensor, shape: StackShape) -> LayerStack | None:
        return None

    def experts(self, experts: Sequence[ExpertParts], sizes: tuple[int, int], clamp: Clamp | None) -> ExpertsOp | None:
        """Of weights that are held alike, which it moves together."""
        stored = [part.stored for part in experts if part.stored is not None]
        if len(stored) < len(experts):
            return None
        gate_up, down = [part[0] for part in stored], [part[1] for part in stored]
        if not all(parts[0].alike(part) for parts in (gate_up, down) for part in parts):
            return None
        return GroupedExperts(gate_up, down, sizes, clamp)

    def lora(self, sizes: Sequence[int], n_in: int, n_places: int, dtype: torch.dtype) -> LoraOp:
        return TritonLora(self.linear, sizes, n_places, dtype, self._device)


def _linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _shared(groups: SharedGroups | None) -> tuple[SharedPrefix, ...]:
    if groups is None:
        return ()
    start, rows, tokens = (t.cpu().numpy() for t in (groups.start, groups.rows, groups.tokens))
    return tuple(SharedPrefix(rows[a:b], int(n)) for a, b, n in zip(start, start[1:], tokens))
