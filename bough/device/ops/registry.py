"""The ops that models are made of, and which implementation of them this process uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from bough.device.ops.cells import Cells
from bough.device.ops.experts import Clamp, ExpertParts, ExpertsOp, HeldWeight
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import PackedLinear, load
from bough.device.ops.lora import LoraOp
from bough.device.ops.packed import Kind, PackedWeight
from bough.device.ops.rounded import RoundedRows
from bough.device.ops.sampling import Draws, TokenLogprobs
from bough.device.ops.stack import LayerStack, StackedLayer, StackShape

Tensor = torch.Tensor


class RoundedApply(Protocol):
    """Multiplies inputs that come rounded.

    Attributes:
        takes: int8 or float8_e4m3fn, what they are rounded to.
    """

    takes: torch.dtype

    def __call__(self, x: RoundedRows, out: Tensor | None = None) -> Tensor: ...


class PackedApply(Protocol):
    """What :meth:`Ops.packed_linear` makes.

    Attributes:
        packed: describes the weight to other kernels, if there are any.
        stored: the same for those of other devices.
        rounded: the same for inputs that :meth:`Ops.round_rows` has rounded; None: it takes them as they are.
    """

    packed: PackedLinear | None

    @property
    def stored(self) -> HeldWeight | None: ...

    @property
    def rounded(self) -> RoundedApply | None: ...

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...


class Ops(Protocol):
    """One implementation of the ops; dtypes are float32 or bfloat16, tensors contiguous, all on one device.

    T tokens, D the size of the last dimension, H query heads, KH key-value heads, N cells of KV, B rows of a step.
    A row of a result depends on that row's inputs alone, bit for bit in float32: not on the other rows, on how many
    there are, on how a sequence is cut into steps or, but for "reference", on the number of threads. ValueError for
    shapes or dtypes that do not fit together.

    Attributes:
        name: "reference", "cpu" or "triton".
        reason: why this implementation was chosen, for people.
    """

    name: str
    reason: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, D] over its root mean square, rounded to the weight's dtype, times weight [D]; a new tensor like x.

        The weight has x's dtype or is float32.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """``residual += x`` in place, both [T, D]; the norm of the new residual as a new tensor."""
        ...

    def silu_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 I] = gates, then values -> silu(gates) * values [T, I]."""
        ...

    def gelu_mul(self, x: Tensor) -> Tensor:
        """As ``silu_mul`` with the tanh form of gelu (Hendrycks and Gimpel 2016)."""
        ...

    def quantise(self, kind: Kind, weight: Tensor) -> PackedWeight:
        """A weight [N, K], contiguous, rounded to INT8, ROTATED, Q8 or Q4_K (:mod:`bough.device.ops.quantise`)."""
        ...

    def suited(self, weight: PackedWeight) -> PackedWeight:
        """The form of a weight that this device multiplies with; it may be rounded once more."""
        ...

    def round_rows(self, x: Tensor, dtype: torch.dtype) -> RoundedRows:
        """x [T, K] in int8 or float8_e4m3fn, with a scale for each row (:mod:`bough.device.ops.rounded`)."""
        ...

    def rms_norm_rounded(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
    ) -> RoundedRows:
        """``round_rows`` of ``rms_norm`` or, with a residual, of ``add_rms_norm``, bit for bit."""
        ...

    def gated_rounded(self, x: Tensor, gelu: bool, dtype: torch.dtype) -> RoundedRows:
        """``round_rows`` of ``gelu_mul`` or ``silu_mul``, bit for bit."""
        ...

    def rope_kv_write(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        out_loc: Tensor,
        k_cache: Cells,
        v_cache: Cells,
        heads: Heads,
    ) -> Tensor:
        """Norm and rotate queries and keys, write keys and values to their cells, return the queries [T, H, D].

        Rotary dimensions are paired as ``heads`` says; those from R on stay as they are.

        Args:
            qkv: [T, (H + 2 KH) * D]: queries, keys, values.
            cos_sin: [n_positions, R] float32: R/2 cosines, then R/2 sines, of each position; R may be 0.
            positions, out_loc: [T] int32.
            k_cache, v_cache: [N, KH, D], written at ``out_loc``, rounded to what they hold.
            heads: how tokens divide into heads.
        """
        ...

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
        """Causal attention of each row's new tokens, the last of its sequence, to all of it: [T, H, D].

        Beside bfloat16 queries, cells of int8 are computed with as what they stand for; those of float16 and float32
        may be rounded to bfloat16, which loses nothing of what :meth:`rope_kv_write` has written from bfloat16.

        Args:
            q: [T, H, D]; query head h reads key-value head h // (H / KH).
            k_cache, v_cache: [N, KH, D], this step's tokens included.
            page_table: [n_rows, max_len] int32 locs by row and position.
            rows: [B] int32 row of each sequence in the page table.
            q_start: [B + 1] int32 where the new tokens of each sequence begin; at least one each.
            seq_len: [B] int32 length of each sequence with its new tokens.
            scoring: how scores become weights. Neither cells nor locs that no query of a row sees are looked at.
            groups: rows with equal leading locs, which may be read once for all of them. Changes no bit of the result.
        """
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """First index of the largest value of each row of [S, V], int64 [S].

        -1 for a row that holds a NaN or +inf, or nothing but -inf: it has no distribution to sample from.
        """
        ...

    def apply_bitmask(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place.

        Args:
            logits: [S, V].
            masks: [R, ceil(V / 32)] int32; bit i of word w is set where token 32 w + i is allowed.
            rows: [R] int64, different rows of ``logits``, one for each mask.
        """
        ...

    def penalise(self, logits: Tensor, entries: Tensor) -> None:
        """Lower the logits of tokens that occurred, in place.

        Args:
            logits: [S, V] float32.
            entries: [4, N] int32, pairs of row and id of which no two are the same; then, as bits of float32, what
                divides a positive logit and multiplies another, and what is subtracted from the result.
        """
        ...

    def masked_argmax(self, logits: Tensor, masks: Tensor, rows: Tensor, tokens: Tensor) -> None:
        """Replace ``tokens[rows]`` by what :meth:`argmax` would find after :meth:`apply_bitmask`; ``logits`` stay.

        Args:
            logits, masks, rows: as for :meth:`apply_bitmask`.
            tokens: [S] int64, the :meth:`argmax` of ``logits``; what is negative stays.
        """
        ...

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """One token for each row of logits [S, V], int64 [S]: see :mod:`bough.device.ops.sampling`.

        -1 for a row whose ``draws.best`` is -1, whatever it holds.
        """
        ...

    def logprobs(self, logits: Tensor, tokens: Tensor, n_top: int, asked: Tensor) -> TokenLogprobs:
        """Log-probabilities of the rows of logits [N, V]: of ``tokens`` [N] int64, of the ``n_top`` <= V likeliest
        tokens, and of the ids ``asked`` [A] int64."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        """A function x [T, in] -> ``x weight^T + bias`` [T, out], of weight [out, in] and bias [out] or None.

        It may keep its own copy of the weight. "cpu" takes float32 only; for bfloat16 see ``packed_linear``.
        """
        ...

    def packed_linear(self, weight: PackedWeight, bias: Tensor | None) -> PackedApply:
        """A function (x [T, in], out [T, out] or None) -> ``x weight^T + bias`` in x's dtype, in ``out`` if given.

        x is rounded as :func:`bough.device.ops.packed.quantise_inputs` says, and where bfloat16 is multiplied as
        integers both are as :mod:`bough.device.ops.fixed` says; products are summed up in float32 or
        exactly, in an order that depends on ``weight`` alone. ``out`` has contiguous rows, any distance apart.
        """
        ...

    def layer_stack(self, layers: Sequence[StackedLayer], final_norm: Tensor, shape: StackShape) -> LayerStack | None:
        """All layers in one call (:mod:`bough.device.ops.stack`); None where that cannot be."""
        ...

    def experts(self, experts: Sequence[ExpertParts], sizes: tuple[int, int], clamp: Clamp | None) -> ExpertsOp | None:
        """All experts of a layer of (hidden size, inner size) in one call (:mod:`bough.device.ops.experts`); None where
        that cannot be. ``clamp`` is the activation, instead of :meth:`silu_mul`."""
        ...

    def lora(self, sizes: Sequence[int], n_in: int, n_places: int, dtype: torch.dtype) -> LoraOp:
        """The low-rank updates of a layer whose parts have ``sizes`` outputs (:mod:`bough.device.ops.lora`)."""
        ...

    def packed_rows(self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights of outputs ids [T] int32, [T, in] in ``dtype``, rounded to it once."""
        ...


def resolve_ops(
    kernels: Literal["auto", "reference"], device: torch.device | None = None, spare: Callable[[], int] | None = None
) -> Ops:
    """The ops of this process: compiled kernels where there are any, unless the reference is asked for.

    ``spare``: bytes that weights may take a second time, in forms that few rows read faster, asked before each of them;
    None: any.

    On a CUDA ``device`` they are Triton's, compiled when they are first called. On the CPU the first call may compile
    them, which takes minutes; without a compiler it warns once and returns the reference.
    """
    from bough.device.ops.cpu import CpuOps
    from bough.device.ops.reference import ReferenceOps

    if kernels == "reference":
        return ReferenceOps("asked for")
    if device is not None and device.type == "cuda":
        from bough.device.ops.triton.ops import TritonOps

        return TritonOps(device, f"for {torch.cuda.get_device_name(device)}")
    loading = load()
    if loading.library is None:
        return ReferenceOps(loading.reason)
    return CpuOps(loading.library, f"{loading.library.isa()}, {loading.reason}", spare)
