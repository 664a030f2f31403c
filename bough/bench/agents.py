"""``bough bench agents``: what the engine in this process makes of programs: branches of one prefix, and agents.

The branches run as one fork, as as many plain requests at once, and as those without a prefix cache. The agents take
turns: each call's prompt is the conversation so far, between two calls lies a pause as a tool makes it, and the KV pool
holds a part of all conversations. They run under ``lpm``, and under the policy and the eviction ``program``. A few
agents in a roomy pool say what they append to each answer, an instruction that is always the same; it is computed in
their pauses, or is not.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bough.base.cli import add_arguments, from_arguments
from bough.base.config import Config
from bough.base.errors import ConfigError
from bough.bench.measures import Figures, percentile, table
from bough.bench.text import words

if TYPE_CHECKING:
    from bough.engine.async_engine import AsyncEngine

Row = tuple[Config, "Callable[[AsyncEngine], Awaitable[Figures]]"]
"""Of an engine, and what is measured on it."""

BRANCHES, PREFIX, SAID = 16, 1000, 32
"""Branches, tokens of their prefix, tokens of an answer."""
AGENTS, TURNS, TASK, RESULT = 16, 8, 200, 48
"""Agents, calls of each, tokens of its task and of what a tool returns."""
POOL_SHARE = 4
"""The agents' pool holds the last conversations of one in so many."""
PAUSES = (0.2, 1.0)
"""Seconds of a tool, from and to."""
FEW, INSTRUCTION = 4, 256
"""Agents that say what they append, and its tokens."""
HEARTBEAT = 0.6
"""Seconds after which the counters of an idle engine are there."""
COLUMNS = ("generated_per_s", "computed_tokens", "hit_rate", "answer_mean_s", "completion_mean_s",
           "completion_p99_s", "seconds")  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    """The model, the device and the rows; the workload is fixed."""
    add_arguments(parser, ("model", "device"))
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose names begin so (default: all)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start an engine for each row and measure it."""
    from bough.base.log import configure

    configure("bench", "warning")
    rows = _rows(from_arguments(arguments, Config()))
    chosen = {name: row for name, row in rows.items() if name.startswith(arguments.rows)}
    if not chosen:
        raise ConfigError(f"no row begins with {arguments.rows!r}; there are {', '.join(rows)}")
    return {"rows": asyncio.run(_all(chosen))}


async def _all(rows: dict[str, Row]) -> dict[str, Figures]:
    return {name: await _measured(config, work) for name, (config, work) in rows.items()}


def _rows(config: Config) -> dict[str, Row]:
    context = TASK + TURNS * (SAID + RESULT)
    room, pool = 2 * BRANCHES * PREFIX, AGENTS * context // POOL_SHARE
    return {
        "branches, one fork": (_with(config, room), _forked),
        "branches, plain requests": (_with(config, room), _plain),
        "branches, no cache": (_with(config, room, cache="none"), _plain),
        "agents, lpm": (_with(config, pool), _agents),
        "agents, program": (_with(config, pool, policy="program"), _agents),
        "pauses, computed ahead": (_with(config, room, policy="program"), _announcing),
        "pauses, idle": (_with(config, room, policy="program", prefetch="off"), _announcing),
    }


def _with(
    config: Config,
    pool: int,
    cache: Literal["radix", "none"] = "radix",
    policy: Literal["lpm", "program"] = "lpm",
    prefetch: Literal["on", "off"] = "on",
) -> Config:
    eviction: Literal["program", "lru"] = "program" if policy == "program" else "lru"
    kv = dataclasses.replace(config.kv, pool_tokens=pool, cache=cache, eviction=eviction)
    schedule = dataclasses.replace(config.schedule, policy=policy, prefetch=prefetch)
    return dataclasses.replace(config, kv=kv, schedule=schedule)


async def _measured(config: Config, work: Callable[[AsyncEngine], Awaitable[Figures]]) -> Figures:
    from bough.engine.async_engine import AsyncEngine

    engine = await AsyncEngine.launch(config)
    try:
        await _ask(engine, await _prompt(engine, random.Random("warm-up"), 64), 4)
        before, began = await _counters(engine), time.perf_counter()
        figures = await work(engine)
        figures["seconds"] = round(time.perf_counter() - began, 2)
        after = await _counters(engine)
        figures["computed_tokens"] = after["computed_tokens"] - before["computed_tokens"]
        figures["hit_rate"] = round(
            (after["cached_tokens"] - before["cached_tokens"]) / (after["prompt_tokens"] - before["prompt_tokens"]), 4
        )
    finally:
        await engine.close()
    print(" ".join(f"{name}={value:g}" for name, value in figures.items()), file=sys.stderr, flush=True)
    return figures


async def _counters(engine: AsyncEngine) -> dict[str, int]:
    await asyncio.sleep(HEARTBEAT)
    stats = engine.client.stats
    assert stats is not None
    return {name: getattr(stats, name) for name in ("computed_tokens", "cached_tokens", "prompt_tokens")}


async def _prompt(engine: AsyncEngine, rng: random.Random, n_tokens: int) -> list[int]:
    return (await engine.tokenize(words(rng, n_tokens + 8)))[:n_tokens]


async def _ask(engine: AsyncEngine, ids: list[int], tokens: int, n: int = 1, **program: Any) -> list[list[int]]:
    """The answers' ids, all of ``tokens`` tokens."""
    from bough.base.params import SamplingParams
    from bough.base.program import Program
    from bough.engine.generation import GenerateOptions

    params = SamplingParams(max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True)
    envelope = Program(**program) if program else None
    made = await engine.generate(ids, GenerateOptions(params=params, n=n, program=envelope))
    return [generation.tokens for generation in made]


async def _forked(engine: AsyncEngine) -> Figures:
    prefix, began = await _prompt(engine, random.Random("branches"), PREFIX), time.perf_counter()
    await _ask(engine, prefix, SAID, n=BRANCHES, id="best-of", end=True)
    return {"generated_per_s": round(BRANCHES * SAID / (time.perf_counter() - began), 1)}


async def _plain(engine: AsyncEngine) -> Figures:
    prefix, began = await _prompt(engine, random.Random("branches"), PREFIX), time.perf_counter()
    await asyncio.gather(*(_ask(engine, prefix, SAID) for _ in range(BRANCHES)))
    return {"generated_per_s": round(BRANCHES * SAID / (time.perf_counter() - began), 1)}


async def _agents(engine: AsyncEngine) -> Figures:
    seconds = await asyncio.gather(*(_agent(engine, i) for i in range(AGENTS)))
    return {
        "completion_mean_s": round(sum(seconds) / AGENTS, 2),
        "completion_p99_s": round(percentile(seconds, 99), 2),
        "generated_per_s": round(AGENTS * TURNS * SAID / max(seconds), 1),
    }


async def _agent(engine: AsyncEngine, number: int) -> float:
    """Seconds that one agent takes for all its turns."""
    rng, began = random.Random(f"agent {number}"), time.perf_counter()
    ids = await _prompt(engine, rng, TASK)
    for turn in range(TURNS):
        pause, last = rng.uniform(*PAUSES), turn + 1 == TURNS
        (said,) = await _ask(engine, ids, SAID, id=f"agent {number}", pause=pause, end=last)
        if not last:
            await asyncio.sleep(pause)
            ids = [*ids, *said, *(await _prompt(engine, rng, RESULT))]
    return time.perf_counter() - began


async def _announcing(engine: AsyncEngine) -> Figures:
    answers = [
        answer for agent in await asyncio.gather(*(_announced(engine, i) for i in range(FEW))) for answer in agent
    ]
    return {"answer_mean_s": round(sum(answers) / len(answers), 4)}


async def _announced(engine: AsyncEngine, number: int) -> list[float]:
    """Seconds of each call behind a pause; the agent has said how the next prompt goes on."""
    rng = random.Random(f"announcing {number}")
    instruction = await _prompt(engine, random.Random("instruction"), INSTRUCTION)
    ids, seconds = await _prompt(engine, rng, TASK), list[float]()
    for turn in range(TURNS):
        pause, last, began = rng.uniform(*PAUSES), turn + 1 == TURNS, time.perf_counter()
        after = () if last else tuple(instruction)
        (said,) = await _ask(engine, ids, SAID, id=f"announcing {number}", pause=pause, end=last, after=after)
        seconds.append(time.perf_counter() - began)
        if not last:
            await asyncio.sleep(pause)
            ids = [*ids, *said, *instruction, *(await _prompt(engine, rng, RESULT))]
    return seconds[1:]


def summary(result: dict[str, Any]) -> str:
    """The rows as a table."""
    return (
        f"{BRANCHES} branches of {PREFIX} tokens; {AGENTS} agents of {TURNS} turns; {FEW} that say what follows\n\n"
        + table(result["rows"], COLUMNS, "workload")
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput of the branches and completion of the agents, as bars."""
    from bough.bench.plot import bars

    panels = {"branches: tokens per second": ("branches", "generated_per_s"),
              "agents: mean completion, s": ("agents", "completion_mean_s")}  # fmt: skip
    bars(
        {title: {n: r[key] for n, r in result["rows"].items() if n.startswith(kind)}
         for title, (kind, key) in panels.items()},
        "programs on the engine", path,
    )  # fmt: skip
