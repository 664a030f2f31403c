"""Forms of packed weights that a processor multiplies faster than those they are stored in: with AMX, bytes whose sums
stay in tiles until all inputs are added up, as their scales are of whole outputs.

Sums of groups with scales of their own leave the tiles after each group, which takes more time than bfloat16 would. Nor
may calls of many rows alone use another form: a row's bits must not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bough.device.ops.packed import (
    FOUR_BITS,
    MOST_WHOLE,
    PANEL,
    WHOLE_INPUTS,
    Kind,
    PackedWeight,
    check_whole,
    turn_quads,
    unpack,
)

Tensor = torch.Tensor

PANELS = 256
"""That are rounded at a time: what is held beside the weight stays small."""


def for_tiles(packed: PackedWeight, quantise: Callable[[Kind, Tensor], PackedWeight]) -> PackedWeight:
    """``packed`` with one scale for each output, rounded where it had others: 4 bits as Q4_WHOLE, 8 bits as ROTATED.

    ``quantise`` is that of :class:`bough.device.ops.registry.Ops`. What has too many inputs for that stays as it is.
    """
    if packed.kind in (Kind.BF16, Kind.ROTATED, Kind.Q4_WHOLE) or packed.n_in > MOST_WHOLE:
        return packed
    if packed.kind in FOUR_BITS:
        return pack_whole(packed)
    parts = [quantise(Kind.ROTATED, unpack(part)) for part in _slices(packed)]
    scales = [part.scale for part in parts if part.scale is not None]
    weight, scale = torch.cat([part.weight for part in parts]), torch.cat(scales)
    return PackedWeight(Kind.ROTATED, packed.n_out, packed.n_in, weight, scale)


def _slices(packed: PackedWeight) -> list[PackedWeight]:
    def part(of: Tensor | None, first: int) -> Tensor | None:
        return None if of is None else of[first : first + PANELS]

    return [
        replace(
            packed,
            n_out=min(packed.n_out - first * PANEL, PANELS * PANEL),
            weight=packed.weight[first : first + PANELS],
            scale=part(packed.scale, first),
            sub=part(packed.sub, first),
        )
        for first in range(0, len(packed.weight), PANELS)
    ]


def pack_whole(packed: PackedWeight) -> PackedWeight:
    """A weight of four bits as Q4_WHOLE: the same integers, whose values are rounded to 8 bits with one scale for each
    output. 127 is the largest magnitude that any of its groups could hold.

    Raises ValueError where there are too many inputs.
    """
    n_out, n_in = packed.n_out, packed.n_in
    check_whole(n_in)
    words = packed.weight
    missing = -(words.shape[1] * 8) % WHOLE_INPUTS // 8
    if missing:
        words = torch.nn.functional.pad(words, (0, 0, 0, missing))
    step, start = _steps(packed)
    top = torch.maximum(start.abs(), (start + 15 * step).abs()).amax(1)
    scale = top / 127
    unit = torch.where(top > 0, 256 * 127 / top, 0.0)[:, None]
    finite = unit.isfinite()
    steps = torch.where(finite, step * unit, 0.0).round().int()
    starts = torch.where(finite, start * unit, 0.0).round().int() + (128 * 256 + 128)
    both = torch.nn.functional.pad((steps & 0xFFFF) | (starts << 16), (0, 0, 0, -steps.shape[1] % 4))
    return PackedWeight(Kind.Q4_WHOLE, n_out, n_in, turn_quads(words), scale, turn_quads(both), packed.group)


def _steps(packed: PackedWeight) -> tuple[Tensor, Tensor]:
    """float32 [P, groups, 16] both: a value of four bits q is step * q + start."""
    assert packed.scale is not None
    scale, kind = packed.scale.float(), packed.kind
    if kind == Kind.Q4:
        return scale, -8 * scale
    first, second = scale.unbind(2)
    if kind == Kind.Q4_K:
        assert packed.sub is not None
        steps, starts = packed.sub.float().unbind(2)
        first, second = (of_super.repeat_interleave(8, 1)[:, : steps.shape[1]] for of_super in (first, second))
        return first * steps, -second * starts
    return first, second if kind == Kind.Q4_MIN else -first * second
