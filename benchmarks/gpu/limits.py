"""What the machine can do: the rates that everything else is given as a share of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import Stopwatch


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured rates.

    Attributes:
        bandwidth: bytes per second, read and written, of a copy on the device.
        flops: of a product of square bfloat16 matrices of random numbers.
    """

    bandwidth: float
    flops: float

    def seconds(self, n_bytes: float, n_flops: float) -> float:
        """The least that moving ``n_bytes`` and computing ``n_flops`` at the same time can take."""
        return max(n_bytes / self.bandwidth, n_flops / self.flops)


def measure(watch: Stopwatch, tiny: bool) -> Limits:
    """A copy of 2 GiB and a product of 8,192; some kilobytes where the run is ``tiny``."""
    source = torch.empty(1 << (12 if tiny else 31), dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    copied = watch.seconds(lambda: target.copy_(source))
    n = 64 if tiny else 8192
    a, b = (torch.randn(n, n, device=watch.device).bfloat16() for _ in range(2))
    multiplied = watch.seconds(lambda: a @ b)
    return Limits(2 * source.nbytes / copied, 2 * n**3 / multiplied)
