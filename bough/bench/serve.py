"""``bough bench serve``: throughput, latency and reuse of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

from bough.base.errors import ConfigError
from bough.bench.client import Client
from bough.bench.measures import Figures, measure, medians, table
from bough.bench.text import words
from bough.bench.workloads import WORKLOADS, Sizes, Workload, valid

DEFAULT = "independent,batch1,chat,rag,bestof,fewshot,json"

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
    "e2e_ms_p99",
    "cached_tokens",
    "short",
    "valid",
    "errors",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Where the server is, what is sent, how often."""
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:30000/v1", metavar="URL", help="the server (default: %(default)s)")
    add("--model", metavar="STR", help="the model's name there; the first that the server lists by default")
    add("--workloads", default=DEFAULT, metavar="LIST", help=f"of {', '.join(WORKLOADS)} (default: %(default)s)")
    add("--set", action="append", default=[], metavar="WORKLOAD.SIZE=N", help="change a size; repeatable")
    add("--repeats", type=int, default=3, metavar="INT", help="measured runs of each workload (default: %(default)s)")
    add("--seed", type=int, default=1, metavar="INT", help="another seed, other text (default: %(default)s)")
    add("--label", metavar="STR", help="name of this result; the model's by default")
    add("--openai-only", action="store_true", help="send no field beyond OpenAI's: answers may end early")
    add("--extra", type=json.loads, default={}, metavar="JSON", help="fields added to every request")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the workloads; the key is the OPENAI_API_KEY of the environment, if any."""
    plan = _plan(arguments)
    return uvloop.run(_run(plan, arguments))


def _plan(arguments: argparse.Namespace) -> dict[str, Sizes]:
    """Workload -> sizes; ConfigError for names that do not exist."""
    plan: dict[str, Sizes] = {}
    for name in arguments.workloads.split(","):
        if name not in WORKLOADS:
            raise ConfigError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
        plan[name] = dict(WORKLOADS[name].sizes)
    for item in arguments.set:
        target, _, value = item.partition("=")
        name, _, size = target.partition(".")
        if name not in plan or size not in plan[name]:
            raise ConfigError(f"--set {item}: no such workload in this run, or no such size of it")
        try:
            plan[name][size] = float(value) if "." in value else int(value)
        except ValueError:
            raise ConfigError(f"--set {item}: {value!r} is not a number") from None
    return plan


async def _run(plan: dict[str, Sizes], arguments: argparse.Namespace) -> dict[str, Any]:
    key = os.environ.get("OPENAI_API_KEY", "none")
    model = arguments.model or (await Client(arguments.base_url, "", key).models())[0]
    client = Client(arguments.base_url, model, key, ignore_eos=not arguments.openai_only, extra=arguments.extra)
    results: dict[str, Any] = {}
    await _warm_up(client, random.Random(f"{arguments.seed}/warm-up"))
    for name, sizes in plan.items():
        repeats = await _repeat(client, name, sizes, arguments)
        results[name] = {"sizes": sizes, "median": medians([figures for figures, _ in repeats])}
        results[name]["repeats"] = [figures for figures, _ in repeats]
        error = next((error for _, error in repeats if error), None)
        if error:
            results[name]["first_error"] = error
    return {
        "label": arguments.label or model,
        "model": model,
        "base_url": arguments.base_url,
        "seed": arguments.seed,
        "errors": sum(w["median"]["errors"] > 0 for w in results.values()),
        "workloads": results,
    }


async def _warm_up(client: Client, rng: random.Random) -> None:
    for _ in range(2):
        call = await client.chat([{"role": "user", "content": words(rng, 20)}], 8)
        if call.error is not None:
            raise ConfigError(f"the first request failed: {call.error}")


async def _repeat(
    client: Client, name: str, sizes: Sizes, arguments: argparse.Namespace
) -> list[tuple[Figures, str | None]]:
    """(figures, first error) of each repeat, after a small copy that is not measured."""
    workload = WORKLOADS[name]
    await workload.run(client, _small(workload, sizes), random.Random(f"{arguments.seed}/warm-up/{name}"))
    repeats = []
    for i in range(arguments.repeats):
        busy = time.process_time()
        calls = await workload.run(client, sizes, random.Random(f"{arguments.seed}/{name}/{i}"))
        figures = measure(calls) | {"client_cpu_s": round(time.process_time() - busy, 3)}
        if name == "json":
            figures["valid"] = round(sum(valid(call.texts.get(0, "")) for call in calls) / len(calls), 4)
        error = next((call.error for call in calls if call.error), None)
        shown = " ".join(f"{column}={figures[column]:g}" for column in COLUMNS if column in figures)
        print(f"{name} #{i + 1}: {shown}" + (f" ({error})" if error else ""), file=sys.stderr, flush=True)
        repeats.append((figures, error))
    return repeats


def _small(workload: Workload, sizes: Sizes) -> Sizes:
    return sizes | {name: min(value, sizes[name]) for name, value in workload.warm.items()}


def summary(result: dict[str, Any]) -> str:
    """The medians as a table."""
    rows = {name: w["median"] for name, w in result["workloads"].items()}
    columns = [c for c in COLUMNS if any(c in figures for figures in rows.values())]
    return f"{result['label']}: medians\n\n" + table(rows, columns, "workload")


def plot(result: dict[str, Any], path: Path) -> None:
    """Throughput and time to the first token of each workload, as bars."""
    from bough.bench.plot import bars

    rows = {name: w["median"] for name, w in result["workloads"].items()}
    panels = {"tokens per second": "total_per_s", "first token, ms (median)": "ttft_ms_p50"}
    bars(
        {title: {name: figures.get(key, 0.0) for name, figures in rows.items()} for title, key in panels.items()},
        result["label"],
        path,
    )
