"""Compiles every kernel ahead of time, without a GPU; run in a process of its own, where Triton does not interpret.

Writes one JSON object per line: kernel, architecture, bytes of shared memory, registers, bytes spilled, how often
instructions of interest occur, and products of 32 bits of what was loaded.
``python -m tests.device.triton.ahead [--every] [part of a name]``: what common models launch, each form for one
architecture, in turn; with ``--every``, all forms for all architectures.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bough.device.ops.experts import INPUTS
from bough.device.ops.rounded import LARGEST
from bough.device.ops.triton import attention, elementwise, experts, latent, linear, lora, merge, rope, sampling
from bough.device.ops.triton.launch import warps

ARCHITECTURES = (80, 90)

CODES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
         torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv",
         torch.float64: "fp64"}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """One kernel with the constants of one use.

    ``types``: argument -> dtype of a tensor, or the code of a number; ``odd``: numbers that need not divide by 16;
    ``expects``: instructions that must occur, by architecture.
    """

    name: str
    kernel: Any
    types: dict[str, Any]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    odd: tuple[str, ...] = ()
    expects: dict[int, str] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES


MMA = {80: "mma.sync", 90: "mma.sync"}
WGMMA = {80: "mma.sync", 90: "wgmma"}


def builds(every: bool) -> Iterator[Build]:
    """What a model of the shape of Llama 3.1 8B, and a few others, launch; with ``every``, what any does."""
    yield from attention_builds(list(dict.fromkeys(MODELS + FORMS)) if every else MODELS)
    yield from merge_builds()
    yield from elementwise_builds(every)
    yield from rope_builds(every)
    yield from sampling_builds()
    yield from linear_builds(every)
    yield from latent_builds(every)
    yield from expert_builds(every)
    yield from lora_builds()
    yield from builds_of_one([*rope_builds(False), *sampling_builds(), *linear_builds(False), *expert_builds(False),
                              *lora_builds()])  # fmt: skip


ONES = {"n", "m", "n_kv_heads", "n_blocks", "n_groups", "n_parts", "n_top", "n_asked", "top_k"}
"""Numbers that may be 1, as the rows of a step are. Triton takes a 1 for a constant, which is other code to it."""


def builds_of_one(known: list[Build]) -> Iterator[Build]:
    """Each kernel as it is launched with ONES, where it has any."""
    for build in {build.kernel: build for build in reversed(known)}.values():
        ones = dict.fromkeys(sorted(ONES & build.types.keys()), 1)
        if ones:
            types = {name: kind for name, kind in build.types.items() if name not in ones}
            yield replace(build, name=f"{build.name} of one", types=types, constants={**build.constants, **ones})


def elementwise_builds(every: bool) -> Iterator[Build]:
    bf16 = torch.bfloat16
    wide = (8192, 16384, 32768) if every else ()
    for add, width in ((False, 4096), (True, 4096), *((True, width) for width in wide)):
        yield Build(
            f"rms_norm add={add} width={width}", elementwise.rms_norm_kernel,
            {"x": bf16, "residual": bf16, "weight": bf16, "out": bf16, "scales": bf16, "dim": "i32", "eps": "fp32"},
            {"ADD": add, "LARGEST": 0.0, "BLOCK": width}, warps(width),
        )  # fmt: skip
    for gelu in (False, True):
        yield Build(
            f"gated gelu={gelu}", elementwise.gated_kernel, {"x": bf16, "out": bf16, "dim": "i32"},
            {"GELU": gelu, "BLOCK": elementwise.COLUMNS},
        )  # fmt: skip
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for width in (4096, *wide):
            yield Build(
                f"round_rows {dtype} width={width}", elementwise.round_rows_kernel,
                {"x": bf16, "out": dtype, "scales": torch.float32, "dim": "i32"},
                {"LARGEST": LARGEST[dtype], "BLOCK": width}, warps(width),
                architectures=ARCHITECTURES if dtype == torch.int8 else (90,),
            )  # fmt: skip
        for width in dict.fromkeys((4096, 16384, *wide)):
            yield Build(
                f"rms_norm {dtype} width={width}", elementwise.rms_norm_kernel,
                {"x": bf16, "residual": bf16, "weight": bf16, "out": dtype, "scales": torch.float32, "dim": "i32",
                 "eps": "fp32"},
                {"ADD": True, "LARGEST": LARGEST[dtype], "BLOCK": width}, warps(width),
                architectures=ARCHITECTURES if dtype == torch.int8 else (90,),
            )  # fmt: skip
        for gelu in (False, True):
            yield Build(
                f"gated {dtype} gelu={gelu}", elementwise.gated_rounded_kernel,
                {"x": bf16, "out": dtype, "scales": torch.float32, "dim": "i32"},
                {"GELU": gelu, "LARGEST": LARGEST[dtype], "BLOCK": elementwise.CHUNK}, warps(elementwise.CHUNK),
                architectures=ARCHITECTURES if dtype == torch.int8 else (90,),
            )  # fmt: skip


def rope_builds(every: bool) -> Iterator[Build]:
    """Heads that are turned whole; and, of 128 numbers, those of which a part is, or pairs side by side."""
    bf16 = torch.bfloat16
    turned = [(64, 0, False), (32, 64, False), (64, 0, True), (32, 64, True)]
    for kv, (half, tail, pairs) in itertools.product((bf16, INT8, FP8), turned if every else turned[:1]):
        yield Build(
            f"rope_kv_write {kv} half={half} pairs={pairs}", rope.rope_kv_write_kernel,
            {"qkv": bf16, "cos_sin": torch.float32, "positions": torch.int32, "out_loc": torch.int32, "q": bf16,
             "k": kv, "v": kv, "k_scale": torch.float32, "v_scale": torch.float32, "q_norm": bf16, "k_norm": bf16,
             "eps": "fp32", "n_heads": "i32", "n_kv_heads": "i32", "dim": "i32", "half": "i32"},
            {"HEADS": rope.HEADS, "HALF": half, "TAIL": tail, "INTERLEAVED": pairs, "NORM": kv == bf16,
             "QUANTIZED": kv == INT8, "FP8": kv == FP8},
            odd=("n_kv_heads",), architectures=(90,) if kv == FP8 else ARCHITECTURES,
        )  # fmt: skip


BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn

Form = tuple[int, int, torch.dtype, torch.dtype, str]
"""Head dimension, query heads of a key-value head, dtypes of queries and cells, options of the layer."""

MODELS: list[Form] = [
    (128, 4, BF16, BF16, ""), (128, 4, BF16, FP8, ""), (128, 4, BF16, INT8, ""),  # Llama 3.1 8B
    (128, 7, BF16, BF16, ""),  # Qwen 2.5 7B
    (128, 5, BF16, BF16, "window chunked"),  # Llama 4
    (64, 8, BF16, BF16, "window sinks"),  # gpt-oss
    (64, 3, torch.float16, torch.float16, ""),  # SmolLM2
    (256, 2, BF16, BF16, "softcap window"),  # Gemma 2 and 3
    (256, 8, BF16, INT8, ""),  # Qwen3-Next
    (80, 1, BF16, BF16, ""),  # Phi 2
    (128, 4, torch.float32, torch.float32, ""),
]  # fmt: skip

FORMS: list[Form] = [
    *((dim, group, BF16, cells, "") for dim in (64, 128, 256) for group in (*range(1, 9), 12, 16)
      for cells in (BF16, INT8, FP8)),
    *((dim, group, BF16, cells, "") for dim in (80, 96) for group in (1, 4, 7) for cells in (BF16, INT8, FP8)),
    *((dim, group, BF16, BF16, "softcap window sinks") for dim in (64, 128, 256) for group in (1, 2, 3, 4, 7, 8)),
    *((dim, group, torch.float32, torch.float32, "") for dim in (64, 128, 256) for group in (1, 3, 4, 8)),
]  # fmt: skip


def attention_builds(forms: list[Form]) -> Iterator[Build]:
    """For rows of few new tokens and for others."""
    for dim, group, dtype, cells, options in forms:
        for large in (False, True):
            blocks = attention.blocks_of(group, dim, dtype, large, cells)
            yield Build(
                " ".join(filter(None, [
                    f"attend {'large' if large else 'small'} D={dim} G={group} {dtype} {cells}", options,
                ])),
                attention.attend_kernel,
                {"q": dtype, "k": cells, "v": cells, "k_scale": torch.float32, "v_scale": torch.float32,
                 "page_table": torch.int32, "work": torch.int32, "sinks": torch.float32, "out": dtype,
                 "partials": torch.float32, "stats": torch.float32, "table_stride": "i32", "scale": "fp32",
                 "softcap": "fp32", "window": "i32"},
                {"KV_HEADS": 8, "GROUP": group, "DIM": dim, "BLOCK_D": triton.next_power_of_2(dim),
                 "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "LARGE": int(large), "QUANTIZED": cells == INT8,
                 "SOFTCAP": "softcap" in options, "WINDOW": "window" in options, "CHUNKED": "chunked" in options,
                 "SINKS": "sinks" in options,
                 "PRECISION": "ieee" if dtype == torch.float32 else "tf32"},
                blocks.warps, blocks.stages, odd=("table_stride",),
                expects={} if dtype == torch.float32 else WGMMA if large else MMA,
                architectures=(90,) if cells == FP8 else ARCHITECTURES,
            )  # fmt: skip


def merge_builds() -> Iterator[Build]:
    for sinks in (False, True):
        yield Build(
            f"merge sinks={sinks}", merge.merge_kernel,
            {"work": torch.int32, "partials": torch.float32, "stats": torch.float32, "sinks": torch.float32,
             "out": torch.bfloat16},
            {"HEADS": 32, "DIM": 128, "BLOCK_D": 128, "BLOCK_H": merge.HEADS, "SINKS": sinks},
        )  # fmt: skip


def latent_builds(every: bool) -> Iterator[Build]:
    """DeepSeek-V3 and V2 Lite."""
    for n_heads, cells in itertools.product((128, 16), (BF16, INT8, FP8) if every else (BF16,)):
        for large in (False, True):
            queries, heads = latent.blocks_of(n_heads, large)
            yield Build(
                f"latent {'large' if large else 'small'} H={n_heads} {cells}", latent.latent_kernel,
                {"q": torch.bfloat16, "cells": cells, "cell_scale": torch.float32, "page_table": torch.int32,
                 "work": torch.int32, "out": torch.bfloat16, "partials": torch.float32, "stats": torch.float32,
                 "table_stride": "i32", "scale": "fp32"},
                {"HEADS": n_heads, "BLOCK_H": heads, "REST": 64, "BLOCK_R": 64, "LATENT": 512, "BLOCK_M": queries,
                 "BLOCK_N": latent.KEYS, "LARGE": int(large), "QUANTIZED": cells == INT8, "PRECISION": "tf32"},
                latent.warps_of(queries), latent.STAGES, odd=("table_stride",), expects=MMA,
                architectures=(90,) if cells == FP8 else ARCHITECTURES,
            )  # fmt: skip
    yield Build(
        "merge D=576", merge.merge_kernel,
        {"work": torch.int32, "partials": torch.float32, "stats": torch.float32, "sinks": torch.bfloat16,
         "out": torch.bfloat16},
        {"HEADS": 128, "DIM": 576, "BLOCK_D": 1024, "BLOCK_H": merge.HEADS, "SINKS": False},
    )  # fmt: skip


def lora_builds() -> Iterator[Build]:
    bf16, i64, i32 = torch.bfloat16, torch.int64, torch.int32
    yield Build(
        "lora shrink", lora.shrink_kernel,
        {"x": bf16, "places": i32, "table": i64, "inner": torch.float32, "n_in": "i32", "n_parts": "i32",
         "most": "i32"},
        {"BLOCK_R": lora.RANKS, "BLOCK_K": lora.INPUTS}, odd=("n_parts",),
    )  # fmt: skip
    yield Build(
        "lora expand", lora.expand_kernel,
        {"inner": torch.float32, "places": i32, "table": i64, "starts": i32, "out": bf16, "n_out": "i32",
         "n_parts": "i32", "most": "i32"},
        {"BLOCK_N": lora.OUTPUTS, "BLOCK_R": lora.MOST}, odd=("n_parts",),
    )  # fmt: skip


def expert_ways(every: bool) -> list[tuple[int, bool, dict[str, bool]]]:
    """Rows for which blocks are chosen, whether the product is of gates and values, and what is added and bounded."""
    plain, whole = {"BIAS": False, "CLAMP": False}, {"BIAS": True, "CLAMP": True}  # of most models, and of gpt-oss
    return [
        (rows, gated, {"GATED": gated, **how})
        for how in ((plain, whole) if every else (plain,))
        for rows in (16, 64, 256)
        for gated in ((True, False) if every else (rows != 64,))
    ]


def expert_builds(every: bool) -> Iterator[Build]:
    bf16 = torch.bfloat16
    yield Build(
        "route", experts.route_kernel,
        {"ids": torch.int32, "order": torch.int32, "starts": torch.int32, "n": "i32"},
        {"BLOCK": experts.ROUTED}, odd=("n",),
    )  # fmt: skip
    for rows, gated, how in expert_ways(every):
        block_m, block_n, block_k, warps = experts.blocks_of(rows, gated)
        yield Build(
            f"experts rows={rows} {how}", experts.experts_kernel,
            {"x": bf16, "weight": bf16, "bias": bf16, "shares": torch.float32, "order": torch.int32,
             "starts": torch.int32, "out": bf16 if gated else torch.float32, "n_in": "i32", "n_out": "i32",
             "top_k": "i32", "alpha": "fp32", "limit": "fp32"},
            {**how, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "PRECISION": "tf32"},
            warps, 3, odd=("top_k",), expects=MMA if rows == 16 else WGMMA,
        )  # fmt: skip
    yield from quantised_expert_builds(every)


def quantised_expert_builds(every: bool) -> Iterator[Build]:
    common = {"bias": BF16, "shares": torch.float32, "order": torch.int32, "starts": torch.int32, "n_in": "i32",
              "n_out": "i32", "top_k": "i32", "alpha": "fp32", "limit": "fp32"}  # fmt: skip
    for rows, gated, how in expert_ways(every):
        out = {"out": BF16 if gated else torch.float32}
        block_m, block_n, block_b, warps = experts.packed_blocks(rows, gated)
        for bits, floats, group in ((4, False, 32), (4, True, 32), (8, False, 32), (8, False, 16)):
            yield Build(
                f"experts bits={bits} floats={floats} group={group} rows={rows} {how}",
                experts.packed_experts_kernel,
                {"x": BF16, "weight": torch.uint8, "scale": torch.float16, "offset": torch.float16,
                 "n_bytes": "i32", "n_groups": "i32", **common, **out},
                {"BITS": bits, "FLOATS": floats, "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n,
                 "BLOCK_B": block_b, "PRECISION": "tf32", **how},
                warps, 3, odd=("top_k", "n_groups"), expects=MMA if rows == 16 else WGMMA,
            )  # fmt: skip
        block_m, block_n, warps = experts.rounded_blocks(rows, gated)
        for dtype, group in ((INT8, 0), (FP8, 0), (FP8, 128)):
            yield Build(
                f"experts {dtype} group={group} rows={rows} {how}", experts.rounded_experts_kernel,
                {"x": dtype, "x_scale": torch.float32, "weight": dtype, "scale": torch.float32,
                 "n_blocks": "i32", **common, **out},
                {"INTEGERS": dtype == INT8, "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n,
                 "BLOCK_K": INPUTS, **how},
                warps, 3, odd=("top_k", "n_blocks"), expects=MMA if rows == 16 else WGMMA,
                architectures=(90,) if dtype == FP8 else ARCHITECTURES,
            )  # fmt: skip


def sampling_builds() -> Iterator[Build]:
    for dtype in (torch.bfloat16, torch.float32):
        yield Build(
            f"argmax {dtype}", sampling.argmax_kernel, {"logits": dtype, "out": torch.int64, "vocab": "i32"},
            {"BLOCK": sampling.COLUMNS}, 8,
        )  # fmt: skip
        yield Build(
            f"sample {dtype}", sampling.sample_kernel,
            {"logits": dtype, "best": torch.int64, "parameters": torch.float64, "out": torch.int64, "n": "i32",
             "vocab": "i32"},
            {"BLOCK": sampling.DRAWN}, 8, odd=("n",),
        )  # fmt: skip
        yield Build(
            f"logprobs {dtype}", sampling.logprobs_kernel,
            {"logits": dtype, "tokens": torch.int64, "asked": torch.int64, "chosen": torch.float32,
             "ranks": torch.int64, "top_ids": torch.int64, "top": torch.float32, "asked_out": torch.float32,
             "vocab": "i32", "n_top": "i32", "n_asked": "i32"},
            {"BLOCK": sampling.COLUMNS}, 8, odd=("n_top", "n_asked"),
        )  # fmt: skip
    yield Build(
        "penalise", sampling.penalise_kernel,
        {"logits": torch.float32, "entries": torch.int32, "n": "i32", "vocab": "i32"}, {"BLOCK": sampling.PENALISED},
        odd=("n",),
    )  # fmt: skip
    yield Build(
        "apply_bitmask", sampling.apply_bitmask_kernel,
        {"logits": torch.float32, "masks": torch.int32, "rows": torch.int64, "vocab": "i32", "words": "i32"},
        {"BLOCK": sampling.COLUMNS}, 8,
    )  # fmt: skip


def linear_builds(every: bool) -> Iterator[Build]:
    bf16 = torch.bfloat16
    ways = list(itertools.product((16, 64, 256), (False, True) if every else (False,)))
    for m, bias in ways:
        block_m, block_n, block_b, warps = linear.grouped_blocks(m)
        for bits, floats, group in ((4, False, 32), (4, True, 32), (8, False, 32), (8, False, 16)):
            yield Build(
                f"grouped bits={bits} floats={floats} group={group} m={m} bias={bias}", linear.grouped_kernel,
                {"x": bf16, "weight": torch.uint8, "scale": torch.float16, "offset": torch.float16, "bias": bf16,
                 "out": bf16, "m": "i32", "n": "i32", "n_in": "i32", "n_bytes": "i32", "x_stride": "i32",
                 "out_stride": "i32"},
                {"BITS": bits, "FLOATS": floats, "GROUP": group, "BIAS": bias, "BLOCK_M": block_m,
                 "BLOCK_N": block_n, "BLOCK_B": block_b, "PRECISION": "tf32"},
                warps, 3, odd=("m",), expects=MMA if m == 16 else WGMMA,
            )  # fmt: skip
    for m, bias in ways:
        block_m, block_n, warps = linear.rounded_blocks(m)
        for dtype, group in ((INT8, 0), (FP8, 128)):
            yield Build(
                f"rounded {dtype} m={m} bias={bias}", linear.rounded_kernel,
                {"x": dtype, "x_scale": torch.float32, "weight": dtype, "scale": torch.float32, "bias": bf16,
                 "out": bf16, "m": "i32", "n": "i32", "n_in": "i32", "n_blocks": "i32", "out_stride": "i32"},
                {"INTEGERS": dtype == INT8, "GROUP": group, "BIAS": bias, "BLOCK_M": block_m, "BLOCK_N": block_n,
                 "BLOCK_K": INPUTS},
                warps, 3, odd=("m", "n_blocks"), expects=MMA if m == 16 else WGMMA,
                architectures=(90,) if dtype == FP8 else ARCHITECTURES,
            )  # fmt: skip


def compile_one(build: Build, architecture: int) -> dict[str, Any]:
    names = build.kernel.arg_names
    signature, attributes = {}, {}
    for i, name in enumerate(names):
        kind = build.types.get(name)
        if name in build.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = kind if isinstance(kind, str) else f"*{CODES[kind]}"
        if not isinstance(kind, str) or (kind == "i32" and name not in build.odd):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(build.kernel, signature, {(names.index(k),): v for k, v in build.constants.items()}, attributes)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": build.warps, "num_stages": build.stages},
    )
    ptx = made.asm["ptx"]
    return {
        "name": build.name,
        "kernel": build.kernel.fn.__name__,
        "architecture": architecture,
        "shared": made.metadata.shared,
        **resources(made.asm["cubin"]),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma.sync": ptx.count("mma.sync"),
        "cp.async": ptx.count("cp.async.c"),
        "expects": build.expects.get(architecture, ""),
        "narrow": narrow(made.asm["ttir"]),
    }


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack, as the assembler counted them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "stack": int(found[2])}


CARRIES = {"arith.addi", "arith.subi", "arith.muli", "arith.select", "arith.maxsi", "arith.minsi", "tt.splat",
           "tt.broadcast", "tt.expand_dims"}  # fmt: skip
"""Operations whose 32-bit results follow from what they are given."""


def narrow(ttir: str) -> list[str]:
    """Where an address is reckoned from a product of 32 bits with a factor that was loaded, or with a program's number
    and an argument: a cell, a token or a row times its size may be more than 2^31, so they have to be widened first."""
    loaded: set[str] = set()
    programs: set[str] = set()
    products: set[str] = set()
    arguments = set(re.findall(r"(%\w+): i32", ttir))
    found = []
    for line in ttir.splitlines():
        if "scf.for" in line:
            pairs = re.findall(r"(%\w+) = (%\w+)", line)
            for known in (loaded, programs, products):
                known |= {name for name, value in pairs if value in known}
            continue
        made = re.match(r"\s*(%\w+) = ([\w.]+)(.*)", line)
        if made is None:
            continue
        name, operation, rest = made.groups()
        rest = rest.partition(" loc(")[0]
        given = set(re.findall(r"%\w+", rest))
        if operation == "tt.addptr" and given & products:
            found.append(line.strip())
        elif operation == "tt.get_program_id":
            programs.add(name)
        elif operation == "tt.load" and rest.endswith(("!tt.ptr<i32>", "!tt.ptr<i32>>")):
            loaded.add(name)
        elif operation in CARRIES and rest.endswith(("i32", "i32>")):
            for known in (loaded, programs, products, arguments):
                if given & known:
                    known.add(name)
            if operation == "arith.muli" and (given & loaded or (given & programs and given & arguments)):
                products.add(name)
    return found


def main() -> None:
    every, part = "--every" in sys.argv, next((a for a in sys.argv[1:] if not a.startswith("--")), "")
    for i, build in enumerate(builds(every)):
        # Forms come in pairs, of which the one and the other are for either architecture first.
        turn = (i + i // 2) % len(build.architectures)
        for architecture in build.architectures if every else build.architectures[turn : turn + 1]:
            if part in build.name:
                try:
                    print(json.dumps(compile_one(build, architecture)), flush=True)
                except Exception as error:
                    print(
                        json.dumps({"name": build.name, "architecture": architecture, "error": str(error)}), flush=True
                    )


if __name__ == "__main__":
    main()
