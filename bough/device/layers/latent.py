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

from dataclasses import dataclass

import torch

from bough.device.layers.context import LayerContext
from bough.device.layers.linear import Linear
from bough.device.layers.norm import NormForm, RMSNorm, normed
from bough.device.ops.cells import Cells, write_cells
from bough.device.ops.heads import Scoring
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
        query = torch.cat((rotate(turning, angles, form.interleaved), per_head(nope, self._to_latent)), dim=2)
        # The values are the keys: what comes out for the rotated dimensions is of no use.
        mixed = self._backend.forward(query, k_cache, k_cache, self._scoring)[..., form.rotary_size :]
        return self._out(per_head(mixed, self._from_latent).flatten(1))


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
