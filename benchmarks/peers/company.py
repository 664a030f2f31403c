"""Whether a workload starves where two others keep the server busy: its figures alone and in their company.

The two others, ``independent`` and ``rag`` with 16 requests at a time each, begin first, with so many requests that
they outlast the third one; it is sent once they generate. One engine runs after the other.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engines import Contender, Engine, Settings
from benchmarks.peers.running import Running, need_servers, start
from benchmarks.peers.work import WORK
from bough.bench.machine import facts
from bough.bench.measures import Figures, measure, medians

OTHERS = "independent", "rag"
LONGER = 6
"""Times as many requests as usual: what keeps them there while the third one runs."""
BEGUN = 1.0
"""Seconds that the others have before the third one comes: all their rows are taken then."""


def alone(running: Running, work: str, seed: str) -> Figures:
    """The figures of ``work`` by itself."""
    return measure(running.run(work, WORK[work].sizes, seed, 600.0))


def beside(running: Running, work: str, seed: str) -> Figures:
    """The figures of ``work`` beside the others, and ``outlasted``: how many of them had not ended before it."""

    def keep(other: str) -> None:
        sizes = WORK[other].sizes
        running.run(other, sizes | {"requests": sizes["requests"] * LONGER}, f"{seed}/{other}", 600.0)

    others = [threading.Thread(target=keep, args=(other,)) for other in OTHERS]
    for other in others:
        other.start()
    time.sleep(BEGUN)
    figures = alone(running, work, seed)
    figures["outlasted"] = sum(other.is_alive() for other in others)
    for other in others:
        other.join()
    return figures


def compare(engines: Sequence[Engine], settings: Settings, third: str, repeats: int) -> dict[str, Any]:
    """The report: medians of every engine."""
    found: dict[str, Any] = {}
    contenders = [Contender(engine, "bf16") for engine in engines]
    need_servers(contenders, settings, "135m")
    for contender in contenders:
        engine = contender.engine
        running = start(contender, settings, "135m", settings.home.log(engine.name))
        try:
            for kind in (third, *OTHERS):
                running.run(kind, WORK[kind].sizes | WORK[kind].warm, "warm-up", 600.0)
            runs = [(alone(running, third, f"a{i}"), beside(running, third, f"b{i}")) for i in range(repeats)]
        finally:
            running.process.stop()
        found[engine.name] = {
            "version": engine.version(settings),
            "alone": medians([a for a, _ in runs]),
            "beside": medians([b for _, b in runs]),
        }
        print(engine.name, json.dumps(found[engine.name], indent=1), flush=True)
    return {"benchmark": "company", "machine": facts(), "third": third, "others": OTHERS, "found": found}
