"""Measures the limits that the floors rest on. A process of its own, so that torch's threads end with it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.peers.floors import Limits
from benchmarks.peers.home import ROOT

if TYPE_CHECKING:
    import torch

    from bough.device.ops.packed import PackedWeight


def measure(threads: int) -> Limits:
    """Run this module with so many threads; about 10 seconds."""
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


def _rate(products: Sequence[Callable[[int], Callable[[], object]]]) -> float:
    """Operations per second of the fastest product of large matrices, each made for their size.

    Small ones tell which are worth the wait: torch multiplies bfloat16 and bytes a hundred times slower where it has no
    instructions for them.
    """

    def rate(n: int, product: Callable[[int], Callable[[], object]], seconds: float) -> float:
        return 2 * n**3 / _least(product(n), seconds)

    small = [rate(256, product, 0.05) for product in products]
    return max(rate(2048, p, 1.0) for p, r in zip(products, small, strict=True) if r > max(small) / 4)


def main() -> None:
    """Print the limits as JSON."""
    import torch

    from bough.device.ops.packed import pack_bf16, pack_int8, pack_rotated
    from bough.device.ops.pages import advise_huge_pages
    from bough.device.ops.registry import resolve_ops

    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    torch.set_num_threads(parser.parse_args().threads)
    memory = torch.empty(1 << 28)  # 1 GiB, far beyond any cache
    advise_huge_pages(memory)
    memory.fill_(1)
    read = _least(memory.sum, 1.5)
    ops = resolve_ops("auto")

    def square(n: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(n, n).to(dtype)

    def ours(n: int, weight: PackedWeight) -> Callable[[], object]:
        return partial(ops.packed_linear(weight, None), square(n))

    def of_torch(n: int, dtype: torch.dtype) -> Callable[[], object]:
        return partial(torch.mm, square(n, dtype), square(n, dtype))

    def bytes_of_torch(n: int) -> Callable[[], object]:
        x = torch.randint(-128, 128, (n, n), dtype=torch.int8)
        return partial(torch._int_mm, x, x)

    def bytes_of_ours(n: int) -> Callable[[], object]:
        return ours(n, pack_int8(torch.randint(0, 256, (n, n), dtype=torch.uint8), torch.ones(n)))

    def transforms_of_ours(n: int) -> Callable[[], object]:
        return ours(n, pack_rotated(torch.randint(0, 256, (n, n), dtype=torch.uint8), torch.ones(n), n))

    # Without instructions for bfloat16, floats are what it is multiplied as.
    types = (torch.bfloat16, torch.float32)
    others = _rate([partial(of_torch, dtype=dtype) for dtype in types])
    bf16 = max(others, _rate([lambda n: ours(n, pack_bf16(square(n)))]))
    int8 = _rate([bytes_of_ours, transforms_of_ours, bytes_of_torch])
    figures = Limits(memory.nbytes / read / 1e9, bf16 / 1e9, int8 / 1e9, others / 1e9)
    print(json.dumps({name: round(getattr(figures, name), 1) for name in Limits.__slots__}))


if __name__ == "__main__":
    main()
