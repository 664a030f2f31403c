"""Multi-head latent attention (DeepSeek-AI 2024): one latent vector for the keys and values of all heads.

A token keeps its latent, from which every head's key and value would be projected, and one rotated key that all heads
share. The projections are absorbed (section 2.1.2 of the paper): a head's query goes through the projection of its keys
into the space of the latents, scores are products with the latents themselves, and the mix of latents that comes out
goes through the projection of the head's values. So heads attend like those of a multi-query layer whose values are a
part of the keys, for prompts as for single tokens: a result does not depend on how a sequence was cut.

Shapes: T new tokens, H heads, R the latent's size, P rotated dimensions, N and V those of a head's other keys and its
values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.layers.norm import NormForm, RMSNorm, normed
from bough.device.ops.cells import Cells, write_cells
from bough.device.ops.heads import Scoring
from bough.device.ops.lora import Runs, Update
from bough.device.ops.reference import ROWS, rotate
from bough.device.ops.rounded import Rows

Tensor = torch.Tensor

NORM = NormForm(1e-6)
"""Of latents, whatever the config says of other norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentForm:
    """What varies between latent attention layers.

    Attributes:
        hidden_size, n_heads: of inputs and outputs, and H.
        latent_size, rotary_size, nope_size, value_size: R, P, N and V.
        query_latent_size: queries come from a latent of this size; 0: from the input.
        bias: of the projections from and to the residual stream, but for ``q_proj``.
        interleaved: rotary dimension 2i is paired with 2i + 1, instead of i with i + P / 2.
        scale: factor of the scores.
    """

    hidden_size: int
    n_heads: int
    latent_size: int
    rotary_size: int
    nope_size: int
    value_size: int
    query_latent_size: int
    bias: bool
    interleaved: bool
    scale: float


class LatentAttention:
    """Projections, rotation, write of the latents and attention of one layer.

    Cells [N, 1, P + R] hold the rotated key, then the latent; there are no cells of values.

    Attributes:
        takes: as :class:`bough.device.layers.linear.Linear`.
    """

    def __init__(self, context: LayerContext, prefix: str, form: LatentForm, rotary: Tensor) -> None:
        """``rotary`` is the table of the layer's rotary embedding [n_positions, P]."""
        self._form, self._rotary = form, rotary
        q_width, hidden = form.n_heads * (form.nope_size + form.rotary_size), form.hidden_size
        kv = f"{prefix}.kv_a_proj_with_mqa", form.latent_size + form.rotary_size
        self._q_norm: RMSNorm | None = None
        if form.query_latent_size:
            first = f"{prefix}.q_a_proj", form.query_latent_size
            self._down = Linear(context, [first, kv], hidden, form.bias)
            self._q_norm = RMSNorm(context, f"{prefix}.q_a_layernorm", form.query_latent_size, NORM)
            self._q = Linear(context, [(f"{prefix}.q_b_proj", q_width)], form.query_latent_size, False)
        else:
            self._down = Linear(context, [kv], hidden, form.bias)
            self._q = Linear(context, [(f"{prefix}.q_proj", q_width)], hidden, False)
        alike = self._q_norm is not None or self._q.takes == self._down.takes
        self.takes = self._down.takes if alike else None
        self._kv_norm = RMSNorm(context, f"{prefix}.kv_a_layernorm", form.latent_size, NORM)
        per_head = form.nope_size + form.value_size
        up = context.parameter(f"{prefix}.kv_b_proj.weight", (form.n_heads * per_head, form.latent_size))
        keys, values = torch.split(up.view(form.n_heads, per_head, -1), [form.nope_size, form.value_size], dim=1)
        self._to_latent, self._from_latent = keys.contiguous(), values.transpose(1, 2).contiguous()
        self._adapters, self._lora = context.adapters, LatentLora(form, context.dtype, context.device)
        if context.adapters is not None:
            context.adapters.weights(f"{prefix}.kv_b_proj", form.n_heads * per_head, form.latent_size, self._lora)
        self._out = Linear(context, [(f"{prefix}.o_proj", hidden)], form.n_heads * form.value_size, form.bias)
        self._scoring = Scoring(form.scale)
        self._backend = context.attention

    def __call__(self, x: Rows, k_cache: Cells, v_cache: Cells) -> Tensor:
        """[T, hidden] -> [T, hidden]; ``k_cache`` are this layer's cells."""
        form, batch = self._form, self._backend.batch
        sizes = [form.query_latent_size, form.latent_size, form.rotary_size]
        q_latent, latent, key = torch.split(self._down(x), sizes, dim=1)
        q = self._q(x if self._q_norm is None else normed(self._q_norm, q_latent.contiguous(), None, self._q.takes))
        nope, turning = torch.split(q.view(len(x), form.n_heads, -1), [form.nope_size, form.rotary_size], dim=2)
        angles = self._rotary[batch.positions][:, None]
        key = rotate(key[:, None], angles, form.interleaved)
        cell = torch.cat((key, self._kv_norm(latent.contiguous())[:, None]), dim=2)
        write_cells(k_cache, batch.out_loc, cell)
        absorbed = per_head(nope, self._to_latent)
        runs = None if self._adapters is None else self._adapters.runs
        if runs is not None:
            self._lora.to_latent(runs, nope, absorbed)
        query = torch.cat((rotate(turning, angles, form.interleaved), absorbed), dim=2)
        # The values are the keys: what comes out for the rotated dimensions is of no use.
        mixed = self._backend.forward(query, k_cache, k_cache, self._scoring)[..., form.rotary_size :]
        values = per_head(mixed, self._from_latent)
        if runs is not None:
            self._lora.from_latent(runs, mixed, values)
        return self._out(values.flatten(1))


class LatentLora:
    """:class:`bough.device.ops.lora.LoraPlaces` of the projection of latents to keys and values, taken apart by heads
    as the projection itself is: latents in the cache are the model's own."""

    def __init__(self, form: LatentForm, dtype: torch.dtype, device: torch.device) -> None:
        self._form, self._dtype, self._device = form, dtype, device
        self._places: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def set(self, place: int, update: Update | None) -> None:
        self._places.pop(place, None)
        if update is None:
            return
        form, (a, b) = self._form, (update.a[0], update.b[0])
        assert a is not None and b is not None
        b = b.to(self._device, self._dtype).view(form.n_heads, form.nope_size + form.value_size, -1)
        keys, values = torch.split(b, [form.nope_size, form.value_size], dim=1)
        a = a.to(self._device, self._dtype).expand(form.n_heads, -1, -1).contiguous()
        self._places[place] = a, keys.contiguous(), values.transpose(1, 2).contiguous()

    def to_latent(self, runs: Runs, x: Tensor, out: Tensor) -> None:
        """Add to ``out`` [T, H, latent], queries as latents, what the adapters make of x [T, H, nope]."""
        for rows, (a, keys, _) in self._rows(runs):
            out[rows] += per_head(per_head(x[rows], keys), a)

    def from_latent(self, runs: Runs, x: Tensor, out: Tensor) -> None:
        """Add to ``out`` [T, H, value] what the adapters make of x [T, H, latent], mixtures of latents."""
        for rows, (a, _, values) in self._rows(runs):
            out[rows] += per_head(per_head(x[rows], a.transpose(1, 2)), values)

    def _rows(self, runs: Runs) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
        for place, first, count, step in runs.spans:
            if place in self._places:
                yield slice(first, first + count * step, step), self._places[place]


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, H, A] times weight [H, A, B] of each head -> [T, H, B], contiguous.

    ROWS tokens at a time, so that a token's sums do not depend on how many there are; bfloat16 on a GPU all at once, as
    its other products are computed.
    """
    n = len(x)
    if x.is_cuda and x.dtype != torch.float32:
        return torch.bmm(x.transpose(0, 1), weight).transpose(0, 1).contiguous()
    out = x.new_empty(n, *weight.shape[::2])
    for first in range(0, n, ROWS):
        block = x[first : first + ROWS]
        missing = ROWS - len(block)
        if missing:
            block = torch.cat((block, block.new_zeros(missing, *block.shape[1:])))
        product = torch.bmm(block.transpose(0, 1).contiguous(), weight).transpose(0, 1)
        out[first : first + ROWS] = product[: ROWS - missing]
    return out
