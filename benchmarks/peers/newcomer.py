"""What a long prompt does to a stream that it comes beside, and how long it takes itself.

One engine runs after the other.
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

STREAM, PROMPT = "batch1", "prefill2048"
BEGUN = 1.0
"""Seconds that the stream has for itself before the prompt comes."""
MOST_SECONDS = 300.0


def together(running: Running, seed: str, tokens: dict[str, int]) -> dict[str, Figures]:
    """The figures of the stream and of the prompt, and whether the stream ``outlasted`` it; ``tokens`` of the answer
    and of the prompt."""
    found: dict[str, Figures] = {}

    def run(work: str, size: str) -> None:
        sizes = WORK[work].sizes | {"requests": 1, size: tokens[work]}
        found[work] = measure(running.run(work, sizes, f"{seed}/{work}", MOST_SECONDS))

    stream = threading.Thread(target=run, args=(STREAM, "out"))
    stream.start()
    time.sleep(BEGUN)
    run(PROMPT, "prompt")
    found[PROMPT]["outlasted"] = int(stream.is_alive())
    stream.join()
    if STREAM not in found:
        raise RuntimeError("the stream failed, see above")
    return found


def compare(
    engines: Sequence[Engine], settings: Settings, model: str, tokens: Sequence[int], repeats: int
) -> dict[str, Any]:
    """The report: medians of every engine. ``tokens`` of the stream's answer and of the prompt."""
    found: dict[str, Any] = {}
    of = dict(zip((STREAM, PROMPT), tokens, strict=True))
    contenders = [Contender(engine, "bf16") for engine in engines]
    need_servers(contenders, settings, model)
    for contender in contenders:
        engine = contender.engine
        running = start(contender, settings, model, settings.home.log(engine.name))
        try:
            together(running, "warm-up", of)
            runs = [together(running, str(i), of) for i in range(repeats)]
        finally:
            running.process.stop()
        figures = {work: medians([run[work] for run in runs]) for work in of}
        found[engine.name] = {"version": engine.version(settings), **figures}
        print(engine.name, json.dumps(found[engine.name], indent=1), flush=True)
    return {
        "benchmark": "newcomer",
        "machine": facts(),
        "threads": settings.threads,
        "model": model,
        "tokens": of,
        "found": found,
    }
