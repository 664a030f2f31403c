"""Compiles every kernel ahead of time, without a GPU; run in a process of its own, where Triton does not interpret.

Writes one JSON object per line: kernel, architecture, bytes of shared memory, registers, bytes spilled, and how often
instructions of interest occur. ``python -m tests.device.triton.ahead [part of a name]``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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


def builds() -> Iterator[Build]:
    """What a model of the shape of Llama 3.1 8B, and a few others, launch."""
    yield from attention_builds()
    bf16 = torch.bfloat16
    for add in (False, True):
        yield Build(
            f"rms_norm add={add}", elementwise.rms_norm_kernel,
            {"x": bf16, "residual": bf16, "weight": bf16, "out": bf16, "scales": bf16, "dim": "i32", "eps": "fp32"},
            {"ADD": add, "LARGEST": 0.0, "BLOCK": 4096}, 8,
        )  # fmt: skip
    for gelu in (False, True):
        yield Build(
            f"gated gelu={gelu}", elementwise.gated_kernel, {"x": bf16, "out": bf16, "dim": "i32"},
            {"GELU": gelu, "BLOCK": elementwise.COLUMNS},
        )  # fmt: skip
    for dtype in (torch.int8, torch.float8_e4m3fn):
        yield Build(
            f"round_rows {dtype}", elementwise.round_rows_kernel,
            {"x": bf16, "out": dtype, "scales": torch.float32, "dim": "i32"},
            {"LARGEST": LARGEST[dtype], "BLOCK": 4096}, 8,
            architectures=ARCHITECTURES if dtype == torch.int8 else (90,),
        )  # fmt: skip
        for width in (4096, 16384):
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
    for kv in (bf16, torch.int8, torch.float8_e4m3fn):
        yield Build(
            f"rope_kv_write {kv}", rope.rope_kv_write_kernel,
            {"qkv": bf16, "cos_sin": torch.float32, "positions": torch.int32, "out_loc": torch.int32, "q": bf16,
             "k": kv, "v": kv, "k_scale": torch.float32, "v_scale": torch.float32, "q_norm": bf16, "k_norm": bf16,
             "eps": "fp32", "n_heads": "i32", "n_kv_heads": "i32", "dim": "i32", "half": "i32"},
            {"HEADS": rope.HEADS, "HALF": 64, "TAIL": 0, "INTERLEAVED": False, "NORM": kv == bf16,
             "QUANTIZED": kv == torch.int8, "FP8": kv == torch.float8_e4m3fn},
            odd=("n_kv_heads",), architectures=(90,) if kv == torch.float8_e4m3fn else ARCHITECTURES,
        )  # fmt: skip
    yield from sampling_builds()
    yield from linear_builds()
    yield from latent_builds()
    yield from expert_builds()
    yield from lora_builds()


def attention_builds() -> Iterator[Build]:
    """Both forms over head dimensions, groups, dtypes of cells, and the options of a layer."""
    none = (False, False, False, False)
    cases: list[tuple[int, int, Any, tuple[bool, bool, bool, bool]]] = [
        (128, 4, torch.bfloat16, none),
        (128, 4, torch.float8_e4m3fn, none),
        (128, 4, torch.int8, none),
        (128, 8, torch.bfloat16, (False, True, False, True)),
        (128, 8, torch.bfloat16, (False, True, True, False)),
        (64, 3, torch.bfloat16, none),
        (256, 2, torch.bfloat16, (True, True, False, False)),
        (80, 1, torch.bfloat16, none),
    ]
    for dim, group, kv, on in cases:
        for large in (False, True):
            blocks = attention.blocks_of(group, dim, torch.bfloat16, large, kv == torch.int8)
            names = ("SOFTCAP", "WINDOW", "CHUNKED", "SINKS")
            options = " ".join(name.lower() for name, is_on in zip(names, on) if is_on)
            yield Build(
                f"attend {'large' if large else 'small'} D={dim} G={group} {kv} {options}".strip(),
                attention.attend_kernel,
                {"q": torch.bfloat16, "k": kv, "v": kv, "k_scale": torch.float32, "v_scale": torch.float32,
                 "page_table": torch.int32, "work": torch.int32, "sinks": torch.float32, "out": torch.bfloat16,
                 "partials": torch.float32, "stats": torch.float32, "table_stride": "i32", "scale": "fp32",
                 "softcap": "fp32", "window": "i32"},
                {"KV_HEADS": 8, "GROUP": group, "DIM": dim, "BLOCK_D": triton.next_power_of_2(dim),
                 "BLOCK_M": blocks.m, "BLOCK_N": blocks.n, "LARGE": int(large), "QUANTIZED": kv == torch.int8,
                 **dict(zip(names, on)), "PRECISION": "tf32"},
                blocks.warps, blocks.stages, odd=("table_stride",), expects=WGMMA if large else MMA,
                architectures=(90,) if kv == torch.float8_e4m3fn else ARCHITECTURES,
            )  # fmt: skip
    for sinks in (False, True):
        yield Build(
            f"merge sinks={sinks}", merge.merge_kernel,
            {"work": torch.int32, "partials": torch.float32, "stats": torch.float32, "sinks": torch.float32,
             "out": torch.bfloat16},
            {"HEADS": 32, "DIM": 128, "BLOCK_D": 128, "BLOCK_H": merge.HEADS, "SINKS": sinks},
        )  # fmt: skip


def latent_builds() -> Iterator[Build]:
    """DeepSeek-V3 and V2 Lite."""
    for n_heads in (128, 16):
        for large in (False, True):
            queries, heads = latent.blocks_of(n_heads, large)
            yield Build(
                f"latent {'large' if large else 'small'} H={n_heads}", latent.latent_kernel,
                {"q": torch.bfloat16, "cells": torch.bfloat16, "cell_scale": torch.float32, "page_table": torch.int32,
                 "work": torch.int32, "out": torch.bfloat16, "partials": torch.float32, "stats": torch.float32,
                 "table_stride": "i32", "scale": "fp32"},
                {"HEADS": n_heads, "BLOCK_H": heads, "REST": 64, "BLOCK_R": 64, "LATENT": 512, "BLOCK_M": queries,
                 "BLOCK_N": latent.KEYS, "LARGE": int(large), "QUANTIZED": False, "PRECISION": "tf32"},
                latent.warps_of(queries), latent.STAGES, odd=("table_stride",), expects=MMA,
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


def expert_builds() -> Iterator[Build]:
    bf16 = torch.bfloat16
    yield Build(
        "route", experts.route_kernel,
        {"ids": torch.int32, "order": torch.int32, "starts": torch.int32, "n": "i32"},
        {"BLOCK": experts.ROUTED}, odd=("n",),
    )  # fmt: skip
    for rows in (16, 64, 256):
        for gated in (True, False):
            block_m, block_n, block_k, warps = experts.blocks_of(rows, gated)
            yield Build(
                f"experts gated={gated} rows={rows}", experts.experts_kernel,
                {"x": bf16, "weight": bf16, "bias": bf16, "shares": torch.float32, "order": torch.int32,
                 "starts": torch.int32, "out": bf16 if gated else torch.float32, "n_in": "i32", "n_out": "i32",
                 "top_k": "i32", "alpha": "fp32", "limit": "fp32"},
                {"GATED": gated, "BIAS": False, "CLAMP": False, "BLOCK_M": block_m, "BLOCK_N": block_n,
                 "BLOCK_K": block_k, "PRECISION": "tf32"},
                warps, 3, odd=("top_k",), expects=MMA if rows == 16 else WGMMA,
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


def linear_builds() -> Iterator[Build]:
    bf16 = torch.bfloat16
    for m in (16, 64, 256):
        block_m, block_n, block_b, warps = linear.grouped_blocks(m)
        for bits, group in ((4, 32), (8, 32), (8, 16)):
            yield Build(
                f"grouped int{bits} group={group} m={m}", linear.grouped_kernel,
                {"x": bf16, "weight": torch.uint8, "scale": torch.float16, "offset": torch.float16, "bias": bf16,
                 "out": bf16, "m": "i32", "n": "i32", "n_in": "i32", "n_bytes": "i32", "x_stride": "i32",
                 "out_stride": "i32"},
                {"BITS": bits, "GROUP": group, "BIAS": False, "BLOCK_M": block_m, "BLOCK_N": block_n,
                 "BLOCK_B": block_b, "PRECISION": "tf32"},
                warps, 3, odd=("m",), expects=MMA if m == 16 else WGMMA,
            )  # fmt: skip
    for m in (16, 64, 256):
        block_m, block_n, warps = linear.int8_blocks(m)
        yield Build(
            f"int8 m={m}", linear.int8_kernel,
            {"x": torch.int8, "x_scale": torch.float32, "weight": torch.int8, "scale": torch.float32, "bias": bf16,
             "out": bf16, "m": "i32", "n": "i32", "n_in": "i32", "out_stride": "i32"},
            {"BIAS": False, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": 128}, warps, 3, odd=("m",),
            expects=MMA if m == 16 else WGMMA,
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


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    for build in builds():
        for architecture in build.architectures:
            if part in build.name:
                try:
                    print(json.dumps(compile_one(build, architecture)), flush=True)
                except Exception as error:
                    print(
                        json.dumps({"name": build.name, "architecture": architecture, "error": str(error)}), flush=True
                    )


if __name__ == "__main__":
    main()
