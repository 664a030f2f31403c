"""``bough bench programs``: traces of agents through the real scheduler and cache, on a device that only takes time.

Closed loop: so many programs are open at a time, each call comes after the answer and the pause before it, and the next
program opens when one ends. The cache is a share of the distinct tokens of all prompts. What a policy is compared with:
``fcfs`` and ``lpm`` without hints (least recently used), and a clairvoyant cache under the same admissions.
``declared`` is ``program`` where each request says how many follow. ``foresight`` orders programs by what they are
going to hold, which nobody can know, and shows what that would be worth. Programs of one call, that share nothing or
come from a chat trace, show what the policy costs those who have no use for it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.base.errors import ConfigError
from bough.bench.measures import Figures, percentile, table

if TYPE_CHECKING:
    from bough.base.config import PolicyName
    from bough.sim.clocked import Cost
    from bough.sim.programs import Result, Setting, Task, Told

AGENTS = {"agents": "agents_lmcache_k16_blk16.jsonl.gz", "texts": "lmcache_agent_trace_text.tar.xz"}
CHATS = "mooncake_synthetic_trace.jsonl.gz"
"""Workload -> its file in the folder of traces."""
WORKLOADS = (*AGENTS, "synthetic", "independent")
BLOCK = 16
"""Tokens that share a hash id in the agents' traces; one token of the replay stands for them."""
CHAT_BLOCK = 512
"""The same in the chat trace."""
CHAT_REQUESTS, CHAT_RATES = 1500, (0.5, 1.0, 2.0)
"""How much of the chat trace is played, and how many times faster than its own clock."""
POLICIES: dict[str, tuple[PolicyName, str, Told]] = {
    "fcfs": ("fcfs", "lru", "pauses"),
    "lpm": ("lpm", "lru", "pauses"),
    "lpm-arc": ("lpm", "arc", "pauses"),
    "program": ("program", "program", "pauses"),
    "declared": ("program", "program", "uses"),
    "foresight": ("program", "program", "future"),
}
"""Row -> scheduling and eviction policy, and what the programs say."""
COLUMNS = ("hit_rate", "clairvoyant", "completion_mean_s", "completion_p99_s", "busy", "retracted")


def costs() -> dict[str, Cost]:
    """The devices: SmolLM2-135M on two cores with AVX-512, and a model of 8B in 16 bits on one H100.

    The former from measurements of this engine, the latter from the memory that a step reads and the arithmetic of a
    prompt at 60 % of what the device can do.
    """
    from bough.sim.clocked import Cost

    return {
        "cpu": Cost(step=9e-3, token=6e-4, row=5e-4, unit=BLOCK, chunk=128),
        "gpu": Cost(step=7e-3, token=3.1e-5, row=1.5e-4, unit=BLOCK, chunk=2048),
    }


def configure(parser: argparse.ArgumentParser) -> None:
    """What is replayed; every combination is."""
    add = parser.add_argument
    add("--traces", type=Path, required=True, metavar="DIR", help="folder with the recorded traces")
    add("--workloads", type=_names, default=WORKLOADS, metavar="LIST", help=f"of {','.join(WORKLOADS)} (default: all)")
    add("--programs", type=_counts, default=(16, 32), metavar="LIST", help="open at a time (default: 16,32)")
    add("--shares", type=_counts, default=(2, 5, 10, 20), metavar="LIST",
        help="size of the cache in percent of all distinct prompt tokens (default: 2,5,10,20)")  # fmt: skip
    add("--policies", type=_names, default=tuple(POLICIES), metavar="LIST",
        help=f"of {','.join(POLICIES)} (default: all)")  # fmt: skip
    add("--clock", choices=("cpu", "gpu"), default="cpu", help="the device that steps take the time of (default: cpu)")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Replay everything. Raises ConfigError for a trace that is not there."""
    cost = costs()[arguments.clock]
    cells = []
    for workload in arguments.workloads:
        for cell in _agents(arguments, workload, cost) if workload in AGENTS else _alone(arguments, workload, cost):
            cells.append(cell)
            shown = " ".join(f"{c}={cell[c]:g}" for c in COLUMNS if c in cell)
            print(f"{_name(cell)}: {shown} ({cell['host_s']:.1f} s)", file=sys.stderr, flush=True)
    return {"clock": arguments.clock, "cells": cells}


def _name(cell: dict[str, Any]) -> str:
    load = f"{cell['programs']} open" if cell["programs"] else f"speed {cell['speed']:g}"
    return f"{cell['workload']}, {load}, {cell['share']} %, {cell['policy']}"


def _agents(arguments: argparse.Namespace, workload: str, cost: Cost) -> Iterator[dict[str, Any]]:
    from bough.sim.programs import agents, fitting, footprint, read_texts, read_trace

    path = _existing(arguments.traces / AGENTS[workload])
    every = agents(read_texts(path) if path.name.endswith(".tar.xz") else read_trace(path), BLOCK, BLOCK)
    for share in arguments.shares:
        pool = footprint(every) * share // 100
        tasks = fitting(every, pool)
        for n in arguments.programs:
            for policy in arguments.policies:
                setting = _setting(policy, pool, cost, open_programs=n)
                cell = {"workload": workload, "programs": n, "share": share, "policy": policy}
                yield cell | _played(tasks, setting)


def _alone(arguments: argparse.Namespace, workload: str, cost: Cost) -> Iterator[dict[str, Any]]:
    """Programs of one call, by a clock of their own: near to, at and beyond what the device can do."""
    from bough.sim.programs import chats, fitting, footprint, independents, read_trace

    if workload == "synthetic":
        records = read_trace(_existing(arguments.traces / CHATS))[:CHAT_REQUESTS]
        every = chats(records, CHAT_BLOCK, CHAT_BLOCK)
        cost = type(cost)(cost.step, cost.token, cost.row, unit=CHAT_BLOCK, chunk=cost.chunk)
    elif workload == "independent":
        every = independents(1000, 64, 16, rate=0.5)
    else:
        raise ConfigError(f"{workload!r} is no workload; there are {', '.join(WORKLOADS)}")
    speeds = _speeds(every, cost)
    for share in arguments.shares:
        pool = footprint(every) * share // 100
        tasks = fitting(every, pool)
        for speed in speeds:
            for policy in arguments.policies:
                if POLICIES[policy][2] == "pauses":  # programs of one call have nothing else to say
                    cell = {"workload": workload, "programs": 0, "share": share, "policy": policy}
                    yield cell | _played(tasks, _setting(policy, pool, cost, speed=speed))


def _speeds(tasks: list[Task], cost: Cost) -> list[float]:
    """Speeds of the trace's clock at which computing all prompts takes a half, all and twice the time there is."""
    span = max(task.arrival for task in tasks)
    return [rate * span / (cost.token * cost.unit * sum(t.n_prompt for t in tasks)) for rate in CHAT_RATES]


def _setting(row: str, pool: int, cost: Cost, **load: Any) -> Setting:
    from bough.sim.programs import Setting

    policy, eviction, told = POLICIES[row]
    return Setting(pool, policy, eviction, cost, told=told, step_tokens=_step(cost), **load)


def _step(cost: Cost) -> int:
    """Tokens of the replay in a step, at least those of as many rows as may run."""
    return max(64, cost.chunk // cost.unit)


def _played(tasks: list[Task], setting: Setting) -> dict[str, Any]:
    from bough.sim.clairvoyant import clairvoyant_hits
    from bough.sim.programs import Replay

    began = time.perf_counter()
    result = Replay(tasks, setting).run()
    host = time.perf_counter() - began
    hits = clairvoyant_hits(result.entries, result.log, setting.pool)
    return {
        "eviction": setting.eviction,
        "speed": setting.speed,
        "pool_tokens": setting.pool * setting.cost.unit,
        "clairvoyant": round(hits / result.prompt_tokens, 4),
        **_figures(result),
        "host_s": round(host, 2),
    }


def _figures(result: Result) -> Figures:
    return {
        "hit_rate": round(result.hit_rate, 4),
        "completion_mean_s": round(sum(result.completion) / len(result.completion), 2),
        "completion_p99_s": round(percentile(result.completion, 99), 2),
        "latency_mean_s": round(sum(result.latency) / len(result.latency), 3),
        "latency_p99_s": round(percentile(result.latency, 99), 3),
        "seconds": round(result.seconds, 1),
        "busy": round(result.busy / result.seconds, 4),
        "computed_tokens": result.computed_tokens,
        "retracted": result.retracted,
        "n_programs": len(result.completion),
    }


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(f"there is no trace {path}")
    return path


def summary(result: dict[str, Any]) -> str:
    """Hit rates and completion times as a table."""
    rows = {_name(cell): cell for cell in result["cells"]}
    return f"replayed on the clock of a {result['clock']}\n\n" + table(rows, COLUMNS, "replay")


def plot(result: dict[str, Any], path: Path) -> None:
    """Mean completion over the size of the cache, a line for each policy and number of programs."""
    from bough.bench.plot import lines

    groups: dict[str, tuple[list[float], list[float]]] = {}
    for cell in result["cells"]:
        if cell["programs"]:
            name = f"{cell['workload']}, {cell['programs']} programs, {cell['policy']}"
            xs, ys = groups.setdefault(name, ([], []))
            xs.append(cell["share"])
            ys.append(cell["completion_mean_s"])
    lines(groups, "cache, % of all distinct tokens", "seconds", "mean completion of a program", path)
