"""What adapters cost: tokens per second of rows with 8 adapters beside those of the same rows without any.

    python -m benchmarks.adapters [MODEL] [--rows N] [--rank N] [--quantize KIND] [--repeats N] [--output FILE]

The engine in this process generates from short prompts that share nothing, in turns without adapters and with row i
under adapter i mod 8, all linear layers changed. Rates are medians over the turns; the ratio is that of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bough.base.config import Config, DeviceConfig, KVConfig, LoraConfig, ModelConfig
from bough.base.messages import Namespace
from bough.base.params import SamplingParams
from bough.bench.machine import facts
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import GenerateOptions
from bough.weights.fetch import resolve as fetch
from bough.weights.loader import open_checkpoint

ADAPTERS = 8
PROMPT = 16


def write_adapters(folder: Path, model: Path, rank: int) -> None:
    """Random ones, of every projection of the model's layers, as PEFT saves them."""
    checkpoint = open_checkpoint(model)
    shapes = {
        name.removesuffix(".weight"): checkpoint.tensor(name, torch.bfloat16).shape
        for name in checkpoint.names()
        if name.endswith("_proj.weight")
    }
    checkpoint.close()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
    for i in range(ADAPTERS):
        g, tensors = torch.Generator().manual_seed(i), {}
        for name, (n_out, n_in) in shapes.items():
            prefix = f"base_model.model.{name}"
            tensors[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, n_in, generator=g) / n_in**0.5
            tensors[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(n_out, rank, generator=g) / rank**0.5
        at = folder / f"a{i}"
        at.mkdir()
        (at / "adapter_config.json").write_text(json.dumps(settings))
        save_file(tensors, at / "adapter_model.safetensors")


async def rate(engine: AsyncEngine, rng: random.Random, rows: int, answer: int, adapted: bool) -> float:
    """Tokens per second from when all rows have their first token until all are through."""
    firsts: list[float] = []

    async def one(row: int) -> None:
        options = GenerateOptions(
            params=SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True),
            namespace=Namespace(adapter=f"a{row % ADAPTERS}" if adapted else ""),
        )
        seen = 0
        async for chunk in engine.stream([rng.randrange(100, 20000) for _ in range(PROMPT)], options):
            if chunk.tokens and not seen:
                firsts.append(time.perf_counter())
            seen += len(chunk.tokens)
        assert seen == answer

    await asyncio.gather(*map(one, range(rows)))
    return rows * (answer - 1) / (time.perf_counter() - max(firsts))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    path, rows = fetch(arguments.model, None), [int(n) for n in arguments.rows.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(Path(folder), path, arguments.rank)
        engine = await AsyncEngine.launch(
            Config(
                model=ModelConfig(path=str(path), quantize=arguments.quantize, context_length=1024),
                kv=KVConfig(pool_tokens=max(rows) * 256 + 4096),
                device=DeviceConfig(threads=arguments.threads),
                lora=LoraConfig(lora_dir=folder, max_loras=ADAPTERS),
            )
        )
        rng, results = random.Random(1), []
        try:
            for n in rows:
                # Adapters are read at their first use.
                await rate(engine, rng, max(n, ADAPTERS), 8, True)
                pairs = [
                    (
                        await rate(engine, rng, n, arguments.tokens, False),
                        await rate(engine, rng, n, arguments.tokens, True),
                    )
                    for _ in range(arguments.repeats)
                ]
                plain, adapted = (statistics.median(column) for column in zip(*pairs))
                ratio = statistics.median(with_adapters / without for without, with_adapters in pairs)
                results.append({"rows": n, "base": plain, "adapters": adapted, "ratio": ratio, "pairs": pairs})
                print(
                    f"{n} rows: {plain:.1f} tokens/s, with {ADAPTERS} adapters {adapted:.1f}: {ratio:.3f}", flush=True
                )
        finally:
            await engine.close()
    return {
        "benchmark": "adapters", "machine": facts(), "model": path.stem, "quantize": arguments.quantize,
        "adapters": ADAPTERS, "rank": arguments.rank, "tokens": arguments.tokens, "results": results,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", default="8,16,32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--quantize", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
