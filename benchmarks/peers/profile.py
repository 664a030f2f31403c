"""Where bough's time goes in one row: perf samples every process of the server while the row runs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from datetime import date
from pathlib import Path

from benchmarks.peers.engines import Contender, Engine, Settings
from benchmarks.peers.home import Unavailable
from benchmarks.peers.process import await_usage, descendants, usage
from benchmarks.peers.rows import Row
from benchmarks.peers.running import Running, start
from bough.bench.measures import measure

FORMATS = {16: "bf16", 8: "int8", 4: "int4"}

IDLE_CORES = 0.1
"""Less than that is used by a server that has nothing to do."""
IDLE_SECONDS = 10.0
"""That a server has for what it does while nobody waits."""

LINES = 20
WIDTH = 118


def profile_path(name: str, results: Path) -> Path:
    """Where the profile of a row is kept, beside results of the same machine."""
    return results / "profiles" / f"{name.replace('/', '-')}.txt"


def profile(row: Row, engine: Engine, kind: str | None, times: int, settings: Settings) -> str:
    """Run the row ``times`` times under perf; a text of bough's revision, and of CPU seconds by
    process, by library and by function."""
    if shutil.which("perf") is None:
        raise Unavailable("perf is not installed (Debian: apt-get install linux-perf)")
    contender = Contender(engine, kind or FORMATS[row.bits])
    running = start(contender, settings, row.model, settings.home.log("profile"))
    try:
        small = {name: min(value, row.sizes[name]) for name, value in row.workload.warm.items()}
        running.run(row.work, row.sizes | small, "profile/warm-up", 600.0)
        # A server that nobody waits for puts memory behind cells, which is none of the row's time.
        await_usage(running.process.pid, IDLE_SECONDS, lambda now, before: now.cores(before) < IDLE_CORES)
        with tempfile.TemporaryDirectory() as folder:
            sampled = _sampled(row, running, times, Path(folder) / "perf.data")
        return f"bough {engine.version(settings)}, {date.today()}\n{sampled}"
    finally:
        running.process.stop()


def _sampled(row: Row, running: Running, times: int, data: Path) -> str:
    pids = descendants(running.process.pid)
    command = ["perf", "record", "-q", "-F", "499", "-o", str(data), "-p", ",".join(map(str, pids))]
    sampler = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        before = usage(running.process.pid)
        walls = [measure(running.run(row.work, row.sizes, f"profile/{i}", 600.0))["seconds"] for i in range(times)]
        after = usage(running.process.pid)
    finally:
        sampler.send_signal(signal.SIGINT)
        _, said = sampler.communicate(timeout=60)
    if not data.exists():
        raise Unavailable(f"perf recorded nothing: {said.decode(errors='replace')[-300:]}")
    heading = (
        f"{row.name}: {', '.join(f'{w:.3f}' for w in walls)} s; the server used {after.cores(before):.2f} cores, "
        f"others {after.foreign(before):.2f}"
    )
    parts = [_report(data, "pid,comm"), _report(data, "dso"), _report(data, "comm,dso,symbol")]
    return "\n\n".join([heading, *parts])


def _report(data: Path, sort: str) -> str:
    """The heaviest lines of perf's report, in per cent of all samples."""
    command = ["perf", "report", "-i", str(data), "--stdio", "--no-children", "--sort", sort, "--percent-limit", "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PERF_PAGER": "cat"})
    lines = [
        re.sub(r"\(anonymous namespace\)::|kernels-[0-9a-f-]*", lambda m: "kernels" if "k" == m[0][0] else "", line)
        for line in done.stdout.splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return f"by {sort}:\n" + "\n".join(" ".join(line.split())[:WIDTH] for line in lines[:LINES])
