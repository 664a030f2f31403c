"""First tokens and gaps where people pause before they send, and where nobody does.

The rows with goals send again as soon as an answer has come. There, an engine that generates faster has more prompts to
compute at any time, and answers that end together are followed by prompts that come together: its first tokens wait for
its own speed. Behind pauses every engine has the same to do at the same times, or nearly so. One engine runs after the
other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engines import Contender, Engine, Settings
from benchmarks.peers.running import start
from benchmarks.peers.work import WORK
from bough.bench.machine import facts
from bough.bench.measures import Figures, measure, medians

PAUSES = {"chat": (0.0, 2.0), "json": (0.0, 1.0)}
"""Workload -> mean seconds of the pauses."""
MOST_SECONDS = 300.0


def compare(engines: Sequence[Engine], settings: Settings, repeats: int) -> dict[str, Any]:
    """The report: medians of every engine, workload and pause."""
    found: dict[str, Any] = {}
    for engine in engines:
        rows: dict[str, dict[str, Figures]] = {}
        running = start(Contender(engine, "bf16"), settings, "135m", settings.home.log(engine.name))
        try:
            for kind, pauses in PAUSES.items():
                sizes = WORK[kind].sizes
                running.run(kind, sizes | WORK[kind].warm, "warm-up", MOST_SECONDS)
                rows[kind] = {
                    f"{pause:g}": medians([
                        measure(running.run(kind, sizes | {"pause": pause}, f"{kind}/{pause:g}/{i}", MOST_SECONDS))
                        for i in range(repeats)
                    ])
                    for pause in pauses
                }  # fmt: skip
        finally:
            running.process.stop()
        found[engine.name] = {"version": engine.version(settings), **rows}
        print(engine.name, json.dumps(found[engine.name], indent=1), flush=True)
    return {"benchmark": "pauses", "machine": facts(), "threads": settings.threads, "found": found}
