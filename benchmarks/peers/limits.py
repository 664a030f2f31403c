"""Measures the limits that the floors rest on. A process of its own, so that torch's threads end with it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.peers.floors import Limits
from benchmarks.peers.home import ROOT


def measure(threads: int) -> Limits:
    """Run this module with so many threads; about 6 seconds."""
    command = [sys.executable, "-m", "benchmarks.peers.limits", "--threads", str(threads)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return Limits(**json.loads(done.stdout))


def middle(found: Sequence[Limits]) -> Limits:
    """The median of each: these rates drift by half within minutes where a machine is shared."""
    return Limits(*(round(median(getattr(one, name) for one in found), 1) for name in Limits.__slots__))


def _least(function: Callable[[], object], seconds: float) -> float:
    function()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    """Print the limits as JSON."""
    import torch

    from bough.device.ops.packed import pack_bf16
    from bough.device.ops.pages import advise_huge_pages
    from bough.device.ops.registry import resolve_ops

    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    memory = torch.empty(1 << 28)  # 1 GiB, far beyond any cache
    advise_huge_pages(memory)
    memory.fill_(1)
    read = _least(memory.sum, 1.5)
    n = 2048
    a = torch.randn(n, n).to(torch.bfloat16)
    ours = resolve_ops("auto").packed_linear(pack_bf16(a), None)
    bf16 = min(_least(lambda: a @ a, 1.0), _least(lambda: ours(a), 1.0))
    b = torch.randint(-128, 128, (n, n), dtype=torch.int8)
    int8 = _least(lambda: torch._int_mm(b, b), 1.0)
    figures = Limits(memory.nbytes / read / 1e9, 2 * n**3 / bf16 / 1e9, 2 * n**3 / int8 / 1e9)
    print(json.dumps({name: round(getattr(figures, name), 1) for name in Limits.__slots__}))


if __name__ == "__main__":
    main()
