"""Packed weights of linear layers: how they lie in memory, and how values get in and out of it.

The layout is that of ``PackedLinear`` in csrc/common.h: outputs in panels of 16, inputs in words of 4 bytes, so that a
kernel reads one line of memory for one word of 16 outputs, and a panel from its first byte to its last. N outputs,
K inputs, P panels, W words, G groups of 32 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from bough.device.ops.hadamard import BLOCK, transform

Tensor = torch.Tensor

PANEL = 16
GROUP = 32


class Kind(IntEnum):
    """``LinearKind`` of csrc/common.h, where the arithmetic of each is written."""

    BF16 = 0
    INT8 = 1
    Q8 = 2
    Q4 = 3
    Q4_MIN = 4
    Q4_ZERO = 5
    Q4_K = 6
    Q6_K = 7
    ROTATED = 8
    Q4_WHOLE = 9


ZERO = {Kind.INT8: 128, Kind.Q8: 128, Kind.Q4: 8, Kind.Q6_K: 32, Kind.ROTATED: 128, Kind.Q4_WHOLE: 128}
"""The integer that stands for 0 in kinds without a minimum."""

FOUR_BITS = (Kind.Q4, Kind.Q4_MIN, Kind.Q4_ZERO, Kind.Q4_K, Kind.Q4_WHOLE)

PAIRED = (Kind.Q4_MIN, Kind.Q4_ZERO, Kind.Q4_K)
"""Kinds whose scale comes with a second number."""

SUPER = (Kind.Q4_K, Kind.Q6_K)
"""Kinds whose scales of 256 inputs are divided further."""


DOUBLED_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code of a 4-bit float: a sign, two bits of exponent, one of mantissa."""


MOST_WHOLE = 1 << 17
"""Inputs of ROTATED and Q4_WHOLE: sums of more products of 8 bits may not fit into 32."""

WHOLE_INPUTS = 64
"""Inputs that rows of Q4_WHOLE are filled up to whole ones of."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One packed weight [n_out, n_in].

    Attributes:
        kind: what the words hold.
        weight: int32 [P, W, 16].
        scale: float32 [P, 16] (INT8, ROTATED, Q4_WHOLE), or float16 [P, groups, 16], of PAIRED kinds
            [P, groups, 2, 16]; None for BF16.
        sub: uint8 [P, G, 2, 16] (Q4_K, Q6_K: the bytes of int8), int32 [P, groups, 16] (Q4_WHOLE), else None.
        group: inputs that share a scale of Q8, Q4, Q4_MIN, Q4_ZERO and Q4_WHOLE; 32 otherwise.
    """

    kind: Kind
    n_out: int
    n_in: int
    weight: Tensor
    scale: Tensor | None = None
    sub: Tensor | None = None
    group: int = GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of the weight; a product reads them all, or a :attr:`PackedLinear.compact` form of them."""
        return sum(t.nbytes for t in (self.weight, self.scale, self.sub) if t is not None)


def panels(rows: Tensor) -> Tensor:
    """[N, W, ...] -> [P, W, ..., 16], with zeros for the outputs that the last panel lacks."""
    return _as_panels(rows).contiguous()


def _as_panels(rows: Tensor) -> Tensor:
    """The same, on the memory of the rows where they fill their panels."""
    n = len(rows)
    whole = -(-n // PANEL) * PANEL
    if whole != n:
        rows = torch.cat((rows, rows.new_zeros(whole - n, *rows.shape[1:])))
    return rows.view(-1, PANEL, *rows.shape[1:]).movedim(1, -1)


def from_panels(packed: Tensor, n_out: int) -> Tensor:
    """The inverse of :func:`panels`."""
    return packed.movedim(-1, 1).flatten(0, 1)[:n_out]


def turn_quads(lines: Tensor) -> Tensor:
    """int32 [P, L, 16], L a multiple of 4: of four lines with a word of 16 outputs each, four with four words of each
    fourth output, or the other way round. The order of Q4_WHOLE."""
    return lines.view(len(lines), -1, 4, 4, 4).transpose(2, 4).reshape(lines.shape)


def pad_inputs(rows: Tensor, unit: int) -> Tensor:
    """[N, K] with K filled up to a multiple of ``unit``."""
    missing = -rows.shape[1] % unit
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows


def pack_bf16(weight: Tensor) -> PackedWeight:
    """A bfloat16 weight [N, K] as it is."""
    packed = view_bf16(weight)
    return replace(packed, weight=packed.weight.contiguous())


def view_bf16(weight: Tensor) -> PackedWeight:
    """The same, on the memory of the weight where it can be: for copies, in one pass. No kernel reads it."""
    n_out, n_in = weight.shape
    words = pad_inputs(weight, 2).contiguous().view(torch.int32)
    return PackedWeight(Kind.BF16, n_out, n_in, _as_panels(words))


def pack_int8(q: Tensor, scale: Tensor) -> PackedWeight:
    """uint8 [N, K] and float32 [N]: ``(q - 128) * scale``."""
    n_out, n_in = q.shape
    words = pad_inputs(q, GROUP).contiguous().view(torch.int32)
    return PackedWeight(Kind.INT8, n_out, n_in, panels(words), panels(scale))


def pack_rotated(q: Tensor, scale: Tensor, n_in: int) -> PackedWeight:
    """uint8 [N, K filled up to whole blocks] and float32 [N]: ``(q - 128) * scale`` is the Hadamard transform of the
    weight, over :data:`bough.device.ops.hadamard.BLOCK`."""
    check_whole(n_in)
    words = q.contiguous().view(torch.int32)
    return PackedWeight(Kind.ROTATED, len(q), n_in, panels(words), panels(scale))


def check_whole(n_in: int) -> None:
    """Raises ValueError where there are too many inputs."""
    if n_in > MOST_WHOLE:
        raise ValueError(f"a layer of {n_in} inputs is too wide for 8 bits with one scale: {MOST_WHOLE} at most")


def pack_groups(kind: Kind, q: Tensor, scale: Tensor, sub: Tensor | None = None, group: int = GROUP) -> PackedWeight:
    """Integers with scales.

    Args:
        kind: any but BF16, INT8, ROTATED and Q4_WHOLE.
        q: uint8 [N, K], of Q6_K below 64, or for kinds of four bits also [N, G, 16] with two values per byte: byte i of
            32 inputs holds input i in its low half, input 16 + i in its high half.
        scale: float16 [N, groups], of PAIRED kinds [N, groups, 2].
        sub: uint8 [N, G, 2], for Q4_K and Q6_K.
        group: inputs of a group of ``scale``, where the kind leaves it open.

    Raises ValueError for kinds without groups, for scales that do not fit, and for groups that are no power of two from
    32 on.
    """
    n_out, n_in = len(q), q[0].numel() * (2 if q.ndim == 3 else 1)
    if kind in (Kind.BF16, Kind.INT8, Kind.ROTATED, Kind.Q4_WHOLE):
        raise ValueError(f"{kind.name} is not packed by groups")
    if group % GROUP or (group & (group - 1)):
        raise ValueError(f"groups of {group} inputs are no power of two from {GROUP} on")
    inputs, n_subs = (256, -(-n_in // GROUP)) if kind in SUPER else (group, 0)
    if scale.shape[:2] != (n_out, -(-n_in // inputs)) or (0 if sub is None else sub.shape[1]) != n_subs:
        raise ValueError(f"{kind.name} of {n_out} x {n_in} does not go with scales {list(scale.shape)}")
    if kind in FOUR_BITS and q.ndim == 2:
        halves = pad_inputs(q, GROUP).view(n_out, -1, 2, 16)
        q = halves[:, :, 0] | (halves[:, :, 1] << 4)
    elif q.ndim == 2:
        q = pad_inputs(q, GROUP)
    words = q.contiguous().view(n_out, -1).view(torch.int32)
    return PackedWeight(kind, n_out, n_in, panels(words), panels(scale), None if sub is None else panels(sub), group)


def empty(kind: Kind, n_out: int, n_in: int) -> PackedWeight:
    """Room for a weight of ROTATED or Q4_K."""
    n_panels, sub = -(-n_out // PANEL), None
    if kind == Kind.ROTATED:
        check_whole(n_in)
        words, scale = -(-n_in // BLOCK) * BLOCK // 4, torch.zeros(n_panels, PANEL)
    else:
        n_groups = -(-n_in // GROUP)
        words, sub = n_groups * GROUP // 8, torch.zeros(n_panels, n_groups, 2, PANEL, dtype=torch.uint8)
        scale = torch.zeros(n_panels, -(-n_in // 256), 2, PANEL, dtype=torch.float16)
    return PackedWeight(kind, n_out, n_in, torch.empty(n_panels, words, PANEL, dtype=torch.int32), scale, sub)


def unpack(packed: PackedWeight) -> Tensor:
    """The values [N, K]: bfloat16 for BF16, float32 otherwise. The slow twin of the kernels' reading."""
    values = factors(packed)
    return transform(values)[:, : packed.n_in] if packed.kind == Kind.ROTATED else values


def factors(packed: PackedWeight) -> Tensor:
    """What is multiplied with what :func:`quantise_inputs` gives: the values or, for ROTATED, their transform over
    :data:`bough.device.ops.hadamard.BLOCK`."""
    n_out, n_in, kind = packed.n_out, packed.n_in, packed.kind
    weight = turn_quads(packed.weight) if kind == Kind.Q4_WHOLE else packed.weight
    words = from_panels(weight, n_out).contiguous()
    if kind == Kind.BF16:
        return words.view(torch.bfloat16)[:, :n_in]
    data = words.view(torch.uint8)
    if kind in FOUR_BITS:
        data = data.view(n_out, -1, 16)
        data = torch.cat((data & 15, data >> 4), dim=2).view(n_out, -1)
    assert packed.scale is not None
    scale = from_panels(packed.scale, n_out).float()
    if kind == Kind.ROTATED:
        return (data.float() - ZERO[kind]) * scale[:, None]
    q = data[:, :n_in].float()
    if kind == Kind.INT8:
        return (q - ZERO[kind]) * scale[:, None]

    def spread(values: Tensor, inputs: int) -> Tensor:
        """[N, groups] -> [N, K]."""
        return values.repeat_interleave(inputs, dim=1)[:, :n_in]

    if kind == Kind.Q4_WHOLE:
        assert packed.sub is not None
        steps = spread(from_panels(turn_quads(packed.sub), n_out).long() & 0xFFFFFFFF, packed.group)
        q = (q.long() * (steps & 0xFFFF) + (steps >> 16) & 0xFFFF) >> 8
        return (q - ZERO[kind]).float() * scale[:, None]
    if packed.sub is None:
        if kind == Kind.Q4_MIN:
            return q * spread(scale[..., 0], packed.group) + spread(scale[..., 1], packed.group)
        if kind == Kind.Q4_ZERO:
            return (q - spread(scale[..., 1], packed.group)) * spread(scale[..., 0], packed.group)
        return (q - ZERO[kind]) * spread(scale, packed.group)
    sub = from_panels(packed.sub, n_out)
    if kind == Kind.Q4_K:
        low = spread(scale[..., 0], 256) * spread(sub[..., 0].float(), GROUP)
        return q * low - spread(scale[..., 1], 256) * spread(sub[..., 1].float(), GROUP)
    halves = sub.contiguous().view(torch.int8).reshape(n_out, -1).float()
    return (q - ZERO[kind]) * (spread(scale, 256) * spread(halves, 16))


def quantise_inputs(kind: Kind, x: Tensor) -> Tensor:
    """x [T, K] as the kernels of ``kind`` see it, float32: rounded to bfloat16 (some kernels go on from there:
    :mod:`bough.device.ops.fixed`), or to 8 bits with a scale for each 32
    inputs, or 64 for INT8. Of ROTATED it is the Hadamard transform that is rounded and returned, with one scale;
    Q4_WHOLE has one scale, too, and 16 bits. Inputs that share a scale with a value that is not finite become NaN."""
    if kind == Kind.BF16:
        return x.bfloat16().float()
    n_in = x.shape[1]
    if kind == Kind.ROTATED:
        return _integers(transform(x.float()))
    if kind == Kind.Q4_WHOLE:
        return _integers(x.float(), 127 * 256 + 127)
    size = 2 * GROUP if kind == Kind.INT8 else GROUP
    wide = pad_inputs(x.float(), size).view(len(x), -(-n_in // size), size)
    return _integers(wide).flatten(1)[:, :n_in]


def _integers(x: Tensor, most: int = 127) -> Tensor:
    """float32 with a scale for the last dimension, rounded to integers of up to ``most``."""
    top = x.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(float(most)) / top
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)
    q = (x * inverse).round().nan_to_num(0.0)
    return q * (torch.where(top.isfinite(), top, torch.nan) / most)
