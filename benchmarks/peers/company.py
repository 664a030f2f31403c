"""Whether a workload starves where two others keep the server busy: its figures alone and in their company.

    python -m benchmarks.peers.company [--peers LIST] [--third NAME] [--repeats INT] [--output FILE]

The two others, ``independent`` and ``rag`` with 16 requests at a time each, begin first, with so many requests that
they outlast the third one; it is sent once they generate. One engine runs after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import PEERS, Contender, Engine, Settings, bough
from benchmarks.peers.home import ROOT, Home, default_home
from benchmarks.peers.running import Running, start
from benchmarks.peers.work import WORK
from bough.bench.machine import cpu, facts
from bough.bench.measures import Figures, measure, medians
from bough.device.platform.cpu import spare_onednn

OTHERS = "independent", "rag"
LONGER = 3
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
    threading.Event().wait(BEGUN)
    figures = alone(running, work, seed)
    figures["outlasted"] = sum(other.is_alive() for other in others)
    for other in others:
        other.join()
    return figures


def compare(engines: list[Engine], settings: Settings, work: str, repeats: int) -> dict[str, Any]:
    """Medians of every engine."""
    found: dict[str, Any] = {}
    for engine in engines:
        running = start(Contender(engine, "bf16"), settings, "135m", settings.home.log(engine.name))
        try:
            for kind in (work, *OTHERS):
                running.run(kind, WORK[kind].sizes | WORK[kind].warm, "warm-up", 600.0)
            runs = [(alone(running, work, f"a{i}"), beside(running, work, f"b{i}")) for i in range(repeats)]
        finally:
            running.process.stop()
        found[engine.name] = {
            "version": engine.version(settings),
            "alone": medians([a for a, _ in runs]),
            "beside": medians([b for _, b in runs]),
        }
        print(engine.name, json.dumps(found[engine.name], indent=1), flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, default=default_home())
    parser.add_argument("--peers", default="none")
    parser.add_argument("--third", default="chat", choices=[name for name in WORK if name not in OTHERS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    spare_onednn()
    settings = Settings(Home(arguments.home.resolve()), cpu().threads, sys.executable)
    peers = [] if arguments.peers == "none" else [PEERS[name] for name in arguments.peers.split(",")]
    engines = [bough("bough", ROOT), *peers]
    found = compare(engines, settings, arguments.third, arguments.repeats)
    if arguments.output:
        about = {"benchmark": "company", "machine": facts(), "third": arguments.third, "others": OTHERS}
        arguments.output.write_text(json.dumps(about | {"found": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
