"""Single kernels, as shares of the copy bandwidth and the matrix rate that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.clock import Stopwatch
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from bough.base.plan import SharedPrefix
from bough.device.attention.base import AttentionBatch
from bough.device.attention.triton import TritonAttention
from bough.device.attention.work import HostBatch
from bough.device.ops.experts import ExpertParts, HeldWeight
from bough.device.ops.heads import Heads, Scoring
from bough.device.ops.packed import Kind
from bough.device.ops.sampling import Draws
from bough.device.ops.triton.ops import TritonOps
from bough.device.quant.fp8 import Fp8Linear, round_outputs

Tensor = torch.Tensor


class Case(NamedTuple):
    """A kernel on one shape: what it is to run, and the bytes and operations that it cannot do without."""

    name: str
    run: Callable[[], object]
    n_bytes: float
    n_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class World:
    """Where cases run, and in what; ``tiny`` ones show nothing but that they run."""

    ops: TritonOps
    device: torch.device
    dtype: torch.dtype
    tiny: bool

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def ints(self, values: Any) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int32), device=self.device)


def cases(world: World) -> Iterator[Case]:
    """All of them, the most telling ones first."""
    yield from decode_attention(world)
    yield from prompt_attention(world)
    yield from linears(world)
    yield from elementwise(world)
    yield from experts(world)
    yield from latents(world)
    yield from sampling(world)


def attention(world: World, rows: int, context: int, new: int, heads: Heads, shared: int = 0) -> Callable[[], object]:
    """``rows`` sequences of ``context`` tokens that compute their last ``new``, on scattered cells."""
    width = context + 1
    table = torch.randperm(rows * context).view(rows, context)
    if shared:
        table[:, :shared] = table[0, :shared]
    k, v = (world.randn(rows * context, heads.n_kv_heads, heads.dim) for _ in range(2))
    q = world.randn(rows * new, heads.n_heads, heads.dim)
    index = np.arange(rows, dtype=np.int32)
    starts, lengths = np.arange(0, rows * new + 1, new, dtype=np.int32), np.full(rows, context, np.int32)
    prefixes = (SharedPrefix(index, shared),) if shared else ()
    batch = AttentionBatch(
        world.ints(np.pad(table.numpy(), ((0, 0), (0, width - context)))), world.ints(index), world.ints(starts),
        world.ints(lengths), world.ints(np.zeros(rows * new)), world.ints(np.zeros(rows * new)),
        host=HostBatch(index, starts, lengths, prefixes),
    )  # fmt: skip
    backend = TritonAttention(world.ops)
    backend.plan(batch)
    return partial(backend.forward, q, k, v, Scoring(heads.dim**-0.5))


def decode_attention(world: World) -> Iterator[Case]:
    heads = Heads(4, 2, 16) if world.tiny else Heads(32, 8, 128)
    cell = 2 * heads.n_kv_heads * heads.dim * world.dtype.itemsize
    for rows, context in [(2, 20)] if world.tiny else [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 32768)]:
        run = attention(world, rows, context, 1, heads)
        yield Case(f"decode attention, {rows} rows of {context}", run, rows * context * cell)
    for rows, context, common in [(3, 300, 256)] if world.tiny else [(16, 8704, 8192), (64, 6144, 6000)]:
        kept = rows * (context - common) + common
        run = attention(world, rows, context, 1, heads, common)
        yield Case(f"decode attention, {rows} rows sharing {common} of {context}", run, kept * cell)


def prompt_attention(world: World) -> Iterator[Case]:
    heads = Heads(4, 2, 16) if world.tiny else Heads(32, 8, 128)
    for new in [20] if world.tiny else [2048, 8192]:
        flops = 4.0 * heads.n_heads * heads.dim * new * (new + 1) / 2
        yield Case(f"prompt attention, {new} tokens", attention(world, 1, new, new, heads), 0.0, flops)


def rounded_to(world: World) -> list[torch.dtype]:
    """What this device multiplies with 8 bits."""
    return [torch.int8, torch.float8_e4m3fn] if multiplies_fp8(world.device) else [torch.int8]


def multiplies_fp8(device: torch.device) -> bool:
    """The interpreter does, too."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def linears(world: World) -> Iterator[Case]:
    shape = TINY if world.tiny else LLAMA_8B
    n_in, n_out = shape.hidden_size, 2 * shape.intermediate_size
    weight = world.randn(n_out, n_in) * 0.02
    ways: list[tuple[str, Callable[[Tensor], Tensor], float]] = [
        ("bf16", world.ops.linear(weight, None), 2.0),
        ("int8 (W8A8)", world.ops.packed_linear(world.ops.quantise(Kind.INT8, weight), None), 1.0),
        ("int4 (W4A16)", world.ops.packed_linear(world.ops.quantise(Kind.Q4_K, weight), None), 0.625),
    ]
    if torch.float8_e4m3fn in rounded_to(world):
        ways.append(("fp8", Fp8Linear(round_outputs(weight, None), world.ops).apply, 1.0))
    for rows in [3] if world.tiny else [1, 8, 64, 256, 2048]:
        x = world.randn(rows, n_in)
        moved = x.nbytes + rows * n_out * x.itemsize
        for name, apply, width in ways:
            n_bytes = width * n_in * n_out + moved
            yield Case(f"linear {name}, {rows} rows", partial(apply, x), n_bytes, 2.0 * rows * n_in * n_out)


def elementwise(world: World) -> Iterator[Case]:
    shape = TINY if world.tiny else LLAMA_8B
    dim, inner, n = shape.hidden_size, shape.intermediate_size, 3 if world.tiny else 4096
    ops, x, residual, norm = world.ops, world.randn(n, dim), world.randn(n, dim), world.randn(dim)
    yield Case("add_rms_norm", partial(ops.add_rms_norm, x, residual, norm, 1e-5), 4 * x.nbytes)
    wide = world.randn(n, 2 * inner)
    yield Case("silu_mul", partial(ops.silu_mul, wide), 1.5 * wide.nbytes)
    for target in rounded_to(world):
        name = str(target).removeprefix("torch.")
        run = partial(ops.rms_norm_rounded, x, residual, norm, 1e-5, target)
        yield Case(f"add_rms_norm to {name}", run, 3 * x.nbytes + n * dim)
        yield Case(f"silu_mul to {name}", partial(ops.gated_rounded, wide, False, target), wide.nbytes + n * inner)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    qkv = world.randn(n, (heads.n_heads + 2 * heads.n_kv_heads) * heads.dim)
    k, v = (world.randn(n, heads.n_kv_heads, heads.dim) for _ in range(2))
    angles, at = torch.randn(n, heads.dim, device=world.device), world.ints(np.arange(n))
    yield Case("rope_kv_write", partial(ops.rope_kv_write, qkv, angles, at, at, k, v, heads), 2 * qkv.nbytes)


def experts(world: World) -> Iterator[Case]:
    """Of the shape of Qwen3-30B-A3B."""
    n_experts, k, dim, inner = (4, 2, 32, 16) if world.tiny else (128, 8, 2048, 768)
    parts = [
        ExpertParts(
            (), (), (HeldWeight(world.randn(2 * inner, dim) * 0.02), HeldWeight(world.randn(dim, inner) * 0.02))
        )
        for _ in range(n_experts)
    ]
    op = world.ops.experts(parts, (dim, inner), None)
    assert op is not None
    for rows in [3] if world.tiny else [1, 64, 2048]:
        x = world.randn(rows, dim)
        ids = torch.rand(rows, n_experts, device=world.device).topk(k).indices.int()
        weights = torch.rand(rows, k, device=world.device)
        used = len(torch.unique(ids))
        n_bytes = used * 3 * dim * inner * x.itemsize
        yield Case(f"experts, {rows} rows", partial(op, x, ids, weights), n_bytes, 6.0 * rows * k * dim * inner)


def latents(world: World) -> Iterator[Case]:
    """Of the shape of DeepSeek-V3."""
    n_heads, dim, rows, context = (16, 40, 2, 20) if world.tiny else (128, 576, 64, 1024)
    table = world.ints(torch.randperm(rows * context).view(rows, context).numpy())
    cells, q = world.randn(rows * context, 1, dim), world.randn(rows, n_heads, dim)
    index, lengths = np.arange(rows, dtype=np.int32), np.full(rows, context, np.int32)
    starts = np.arange(rows + 1, dtype=np.int32)
    backend = TritonAttention(world.ops)
    zeros = world.ints(np.zeros(rows))
    backend.plan(
        AttentionBatch(
            table,
            world.ints(index),
            world.ints(starts),
            world.ints(lengths),
            zeros,
            zeros,
            host=HostBatch(index, starts, lengths),
        )  # fmt: skip
    )
    flops = 4.0 * rows * n_heads * context * dim
    run = partial(backend.forward, q, cells, cells, Scoring(dim**-0.5))
    yield Case(f"latent attention, {rows} rows of {context}", run, cells.nbytes, flops)


def sampling(world: World) -> Iterator[Case]:
    rows, vocab = (2, 100) if world.tiny else (256, LLAMA_8B.vocab_size)
    logits = world.randn(rows, vocab)
    yield Case(f"argmax, {rows} rows", partial(world.ops.argmax, logits), logits.nbytes)
    for name, top_k, top_p in (("all", vocab, 1.0), ("top-p", vocab, 0.9), ("top-k", 50, 1.0)):
        draws = Draws(
            logits.argmax(-1), np.full(rows, 0.8, np.float32), np.full(rows, top_k), np.full(rows, top_p),
            np.full(rows, -np.inf), np.arange(rows, dtype=np.uint64), np.arange(rows),
        )  # fmt: skip
        yield Case(f"sample {name}, {rows} rows", partial(world.ops.sample, logits, draws), logits.nbytes)


def measure(case: Case, watch: Stopwatch, limits: Limits) -> dict[str, Any]:
    seconds = watch.seconds(case.run)
    return {
        "name": case.name,
        "us": round(1e6 * seconds, 2),
        "gb_per_s": round(case.n_bytes / seconds / 1e9, 1),
        "tflops": round(case.n_flops / seconds / 1e12, 2),
        "share": round(limits.seconds(case.n_bytes, case.n_flops) / seconds, 4),
    }
