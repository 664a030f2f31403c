"""What other programs cost that use the processors meanwhile: a laptop that compiles, a server that is shared.

Each of those computes on one core without a pause: a fair share of two cores is two thirds beside one of them, and a
half beside two. One engine runs after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.engines import Contender, Engine, Settings
from benchmarks.peers.running import Running, start
from benchmarks.peers.work import WORK
from bough.bench.machine import facts
from bough.bench.measures import Figures, measure, medians

KINDS = "batch1", "independent"
MOST_SECONDS = 120.0
"""A run that takes longer is given up, and nothing of that kind is asked of the engine beside more programs."""


@contextmanager
def programs(n: int) -> Iterator[None]:
    """Beside ``n`` programs that compute all the time."""
    running = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(n)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()


def figures(running: Running, kind: str, beside: int, repeats: int) -> Figures | None:
    """Medians of ``kind`` beside so many programs; None where a run took too long."""
    with programs(beside):
        try:
            calls = [
                running.run(kind, WORK[kind].sizes, f"{kind}/{beside}/{repeat}", MOST_SECONDS)
                for repeat in range(repeats)
            ]
        except TimeoutError:
            return None
    return medians([measure(one) for one in calls])


def compare(engines: Sequence[Engine], settings: Settings, most: int, repeats: int) -> dict[str, Any]:
    """The report: of every engine, kind of work and number of programs, 0 to ``most``."""
    found: dict[str, Any] = {}
    for engine in engines:
        rows: dict[str, dict[str, Figures | None]] = {kind: {} for kind in KINDS}
        for kind, into in rows.items():
            running = start(Contender(engine, "bf16"), settings, "135m", settings.home.log(engine.name))
            try:
                running.run(kind, WORK[kind].sizes | WORK[kind].warm, "warm-up", MOST_SECONDS)
                for beside in range(most + 1):
                    into[str(beside)] = figures(running, kind, beside, repeats)
                    if into[str(beside)] is None:
                        break
            finally:
                running.process.stop()
        found[engine.name] = {"version": engine.version(settings), **rows}
        print(engine.name, json.dumps(found[engine.name], indent=1), flush=True)
    return {"benchmark": "busy", "machine": facts(), "threads": settings.threads, "found": found}
