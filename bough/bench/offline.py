"""``bough bench offline``: throughput and latency of the engine in this process, all prompts at once.

With ``--cache none`` beside the default it shows what the prefix tree costs where nothing is shared.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.base.cli import add_arguments, from_arguments
from bough.base.config import Config
from bough.base.errors import ConfigError
from bough.bench.measures import Call, Figures, measure, medians, table
from bough.bench.text import words

if TYPE_CHECKING:
    from bough.engine.async_engine import AsyncEngine
    from bough.engine.generation import GenerateOptions

COLUMNS = (
    "generated_per_s",
    "total_per_s",
    "requests_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_p50",
    "itl_ms_p99",
    "itl_ms_max",
    "e2e_ms_p50",
    "cached_tokens",
    "errors",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """How many prompts of which length, then the engine's flags."""
    add = parser.add_argument
    add("--prompts", type=int, default=32, metavar="INT", help="requests, all sent at once (default: %(default)s)")
    add("--input-tokens", type=int, default=256, metavar="INT", help="length of a prompt (default: %(default)s)")
    add("--output-tokens", type=int, default=64, metavar="INT", help="length of an answer (default: %(default)s)")
    add("--repeats", type=int, default=3, metavar="INT", help="measured runs (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="INT", help="another seed, other prompts (default: %(default)s)")
    add_arguments(parser, ("model", "kv", "schedule", "device"))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the engine and measure it."""
    if min(arguments.prompts, arguments.input_tokens, arguments.output_tokens, arguments.repeats) < 1:
        raise ConfigError("prompts, tokens and repeats must be at least 1")
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from bough.base.log import configure
    from bough.engine.async_engine import AsyncEngine

    configure("bench", "warning")
    config = from_arguments(arguments, Config())
    engine = await AsyncEngine.launch(config)
    try:
        await _repeat(engine, random.Random(f"{arguments.seed}/warm-up"), 2, arguments.input_tokens, 8)
        repeats = []
        for i in range(arguments.repeats):
            rng = random.Random(f"{arguments.seed}/{i}")
            shape = (arguments.prompts, arguments.input_tokens, arguments.output_tokens)
            figures = measure(await _repeat(engine, rng, *shape))
            shown = " ".join(f"{c}={figures[c]:g}" for c in COLUMNS if c in figures)
            print(f"#{i + 1}: {shown}", file=sys.stderr, flush=True)
            repeats.append(figures)
        name = engine.hello.model.name
    finally:
        await engine.close()
    median = medians(repeats)
    return {
        "label": f"{name}, cache {config.kv.cache}",
        "model": name,
        "cache": config.kv.cache,
        "prompts": arguments.prompts,
        "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens,
        "seed": arguments.seed,
        "errors": int(median["errors"] > 0),
        "median": median,
        "repeats": repeats,
    }


async def _repeat(engine: AsyncEngine, rng: random.Random, prompts: int, tokens: int, answer: int) -> list[Call]:
    from bough.base.params import SamplingParams
    from bough.engine.generation import GenerateOptions

    options = GenerateOptions(params=SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True))
    ids = [(await engine.tokenize(words(rng, tokens + 8)))[:tokens] for _ in range(prompts)]
    return await asyncio.gather(*(_call(engine, prompt, options, answer) for prompt in ids))


async def _call(engine: AsyncEngine, prompt: list[int], options: GenerateOptions, answer: int) -> Call:
    """One request. Tokens count when they come, not when their text is complete."""
    call = Call(asked=answer, start=time.perf_counter())
    async for chunk in engine.stream(prompt, options):
        if chunk.tokens:
            call.stamps.setdefault(chunk.index, []).append(time.perf_counter())
        call.n_prompt, call.n_generated, call.n_cached = chunk.n_prompt, chunk.n_generated, chunk.n_cached
        if chunk.finish is not None and chunk.finish.kind in ("error", "timeout", "abort"):
            call.error = chunk.finish.message or chunk.finish.kind
    call.end = time.perf_counter()
    return call


def summary(result: dict[str, Any]) -> str:
    """The medians as a table."""
    median: Figures = result["median"]
    shape = f"{result['prompts']} prompts of {result['input_tokens']} tokens, {result['output_tokens']} out"
    return f"{result['label']}: {shape}, medians\n\n" + table({"offline": median}, COLUMNS)


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput and time to the first token of every repeat, as bars."""
    from bough.bench.plot import bars

    panels = {"tokens per second": "total_per_s", "first token, ms (median)": "ttft_ms_p50"}
    repeats: list[Figures] = result["repeats"]
    bars(
        {title: {f"#{i + 1}": f.get(key, 0.0) for i, f in enumerate(repeats)} for title, key in panels.items()},
        result["label"],
        path,
    )
