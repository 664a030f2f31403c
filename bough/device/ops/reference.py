"""Every op in plain torch: what the compiled kernels have to compute, and what runs where there are none.

float32 results of a row do not depend on the other rows, bit by bit. Matrix products of different shapes may add up in
different orders, so every product here has a fixed shape: linear layers take ROWS rows at a time, padded with zeros;
attention takes ROWS queries, aligned to their positions, and KEYS keys, aligned to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from bough.device.ops import sampling
from bough.device.ops.cells import Cells, read_cells, write_cells
from bough.device.ops.experts import Clamp, ExpertParts, ExpertsOp
from bough.device.ops.groups import SharedGroups
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.library import PackedLinear
from bough.device.ops.lora import DenseLora, LoraOp
from bough.device.ops.packed import Kind, PackedWeight, factors, quantise_inputs, unpack
from bough.device.ops.quantise import quantise
from bough.device.ops.rounded import RoundsBehind
from bough.device.ops.sampling import Draws, TokenLogprobs
from bough.device.ops.stack import LayerStack, StackedLayer, StackShape

if TYPE_CHECKING:
    from bough.device.ops.registry import PackedApply

Tensor = torch.Tensor

ROWS = 16
KEYS = 128


class ReferenceOps(RoundsBehind):
    """The specification of :class:`bough.device.ops.registry.Ops`."""

    name = "reference"

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return functional.silu(gate) * value

    def gelu_mul(self, x: Tensor) -> Tensor:
        gate, value = x.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * value

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
        n_heads, n_kv_heads = heads.n_heads, heads.n_kv_heads
        parts = qkv.view(len(qkv), n_heads + 2 * n_kv_heads, heads.dim)
        q, k, v = parts.tensor_split((n_heads, n_heads + n_kv_heads), dim=1)
        if heads.norm is not None:
            q, k = (self.rms_norm(x, w, heads.norm.eps) for x, w in ((q, heads.norm.q), (k, heads.norm.k)))
        angles = cos_sin[positions][:, None]
        write_cells(k_cache, out_loc, rotate(k, angles, heads.interleaved))
        write_cells(v_cache, out_loc, v)
        return rotate(q, angles, heads.interleaved)

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
        # Every row reads its prefix itself: the specification of what sharing may not change.
        out = torch.empty_like(q)
        starts, lengths = q_start.tolist(), seq_len.tolist()
        for i, row in enumerate(rows.tolist()):
            new = slice(starts[i], starts[i + 1])
            attend_row(q[new], k_cache, v_cache, page_table[row, : lengths[i]], scoring, out[new])
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        best, index = logits.max(-1)
        # max() passes a NaN on, so these three cover every row without a distribution.
        return torch.where(best.isfinite(), index, -1)

    def apply_bitmask(self, logits: Tensor, masks: Tensor, rows: Tensor) -> None:
        sampling.apply_bitmask(logits, masks, rows)

    def penalise(self, logits: Tensor, entries: Tensor) -> None:
        sampling.penalise(logits, entries)

    def masked_argmax(self, logits: Tensor, masks: Tensor, rows: Tensor, tokens: Tensor) -> None:
        chosen = logits[rows]
        self.apply_bitmask(chosen, masks, torch.arange(len(rows), device=logits.device))
        tokens[rows] = self.argmax(chosen).where(tokens[rows] >= 0, -1)

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        return sampling.sample(logits, draws)

    def logprobs(self, logits: Tensor, tokens: Tensor, n_top: int, asked: Tensor) -> TokenLogprobs:
        return sampling.logprobs(logits, tokens, n_top, asked)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(blocked_linear, weight, bias)

    def quantise(self, kind: Kind, weight: Tensor) -> PackedWeight:
        return quantise(kind, weight)

    def suited(self, weight: PackedWeight) -> PackedWeight:
        return weight

    def packed_linear(self, weight: PackedWeight, bias: Tensor | None) -> PackedApply:
        return ReferencePacked(weight, bias)

    def layer_stack(self, layers: Sequence[StackedLayer], final_norm: Tensor, shape: StackShape) -> LayerStack | None:
        return None

    def experts(self, experts: Sequence[ExpertParts], sizes: tuple[int, int], clamp: Clamp | None) -> ExpertsOp | None:
        return None

    def lora(self, sizes: Sequence[int], n_in: int, n_places: int, dtype: torch.dtype) -> LoraOp:
        return DenseLora(self.linear, sizes, dtype)

    def packed_rows(self, weight: PackedWeight, ids: Tensor, dtype: torch.dtype) -> Tensor:
        return unpack(weight)[ids].to(dtype)


class ReferencePacked:
    """:class:`bough.device.ops.registry.PackedApply` with the values of the weight in float32."""

    rounded = None
    stored = None

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self.packed: PackedLinear | None = None
        self._kind = weight.kind
        self._values, self._bias = factors(weight).float(), None if bias is None else bias.float()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        result = blocked_linear(self._values, self._bias, quantise_inputs(self._kind, x)).to(x.dtype)
        return result if out is None else out.copy_(result)


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """x [T, heads, D] by the angles cos_sin [T, 1, R], computed in float32."""
    half = cos_sin.shape[-1] // 2
    cosine, sine = cos_sin[..., :half], cos_sin[..., half:]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.tensor_split(2, dim=-1)
    turned = a * cosine - b * sine, b * cosine + a * sine
    whole = torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)
    return torch.cat((whole.to(x.dtype), rest), dim=-1)


def blocked_linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """``x weight^T + bias``, ROWS rows at a time."""
    n = len(x)
    out = x.new_empty(-(-n // ROWS) * ROWS, len(weight))
    padded = x if len(out) == n else torch.cat((x, x.new_zeros(len(out) - n, x.shape[1])))
    for first in range(0, n, ROWS):
        out[first : first + ROWS] = functional.linear(padded[first : first + ROWS], weight, bias)
    return out[:n]


def attend_row(q: Tensor, k_cache: Cells, v_cache: Cells, locs: Tensor, scoring: Scoring, out: Tensor) -> None:
    """Attention of one sequence: q [n, H, D], its last n tokens, to the cells locs [length], into out."""
    n_new, n_heads, dim = q.shape
    n_kv_heads, length = k_cache.shape[1], len(locs)
    start = length - n_new
    # Whole blocks of queries by position: those before `start` and after the end are zeros that nobody reads.
    first = start // ROWS * ROWS
    n_blocks = -(-(length - first) // ROWS)
    queries = q.new_zeros((n_blocks * ROWS, n_heads, dim), dtype=torch.float32)
    queries[start - first : length - first] = q
    # Contiguous [KH, blocks, heads of the group * ROWS, D].
    grouped = queries.view(n_blocks, ROWS, n_kv_heads, -1, dim).permute(2, 0, 3, 1, 4).flatten(2, 3).contiguous()
    seen_from = scoring.first_seen(start)
    n_keys = -(-length // KEYS) * KEYS
    k, v = (padded_cells(cache, locs, seen_from, n_keys) for cache in (k_cache, v_cache))
    for block in range(n_blocks):
        position = first + block * ROWS
        result = attend_block(grouped[:, block], k, v, position, scoring)
        begin, end = max(position, start), min(position + ROWS, length)
        heads = result.view(n_kv_heads, -1, ROWS, dim).permute(2, 0, 1, 3).reshape(ROWS, n_heads, dim)
        out[begin - start : end - start] = heads[begin - position : end - position]


def padded_cells(cache: Cells, locs: Tensor, first: int, n: int) -> Tensor:
    """[KH, n, D] float32: the cells at ``locs`` from the ``first`` on, zeros before and after them."""
    cells = torch.zeros((n, *cache.shape[1:]), device=locs.device)
    cells[first : len(locs)] = read_cells(cache, locs[first:])
    return cells.transpose(0, 1).contiguous()


def attend_block(q: Tensor, k: Tensor, v: Tensor, position: int, scoring: Scoring) -> Tensor:
    """q [KH, G * ROWS, D] of the positions from ``position`` on, against k and v [KH, n, D]; online softmax."""
    queries = torch.arange(position, position + ROWS).repeat(q.shape[1] // ROWS)[:, None]
    top = torch.full((*q.shape[:2], 1), -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    begin = scoring.first_seen(position) // KEYS * KEYS
    for first in range(begin, min(position + ROWS, k.shape[1]), KEYS):
        keys = torch.arange(first, first + KEYS)
        seen = keys <= queries
        if scoring.chunked:
            seen &= keys >= queries // scoring.window * scoring.window
        elif scoring.window:
            seen &= keys > queries - scoring.window
        scores = torch.stack([a @ b.T for a, b in zip(q, k[:, first : first + KEYS])]) * scoring.scale
        if scoring.softcap:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        # A query that sees none of these keys keeps what it has, which is nothing where its window begins later.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        decay, weights = torch.exp(top - shift), torch.exp(scores - shift)
        total = total * decay + weights.sum(-1, keepdim=True)
        mixed = torch.stack([a @ b for a, b in zip(weights, v[:, first : first + KEYS])])
        out, top = out * decay + mixed, new_top
    if scoring.sinks is not None:
        sinks = scoring.sinks.view(len(q), -1, 1, 1).expand(-1, -1, ROWS, 1).flatten(1, 2)
        best = torch.maximum(top, sinks)
        out, total = out * torch.exp(top - best), total * torch.exp(top - best) + torch.exp(sinks - best)
    return out / total
