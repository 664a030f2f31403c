"""Time as the device spends it, and what is left of the run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from bough.device.platform.copies import Timer

FLUSH = 256 << 20
"""Bytes that are overwritten between two runs of a kernel: more than caches of devices hold."""


class Budget:
    """Seconds of the whole run; a part that would not fit is left out."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


class Stopwatch:
    """Seconds of single runs, from a cold cache."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self._flushed = torch.empty(FLUSH if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def seconds(self, run: Callable[[], object]) -> float:
        """The median over the repeats, after one run that compiles."""
        run()
        timers = []
        for _ in range(self.repeats):
            self._flushed.zero_()
            timer = Timer(None if self.device.type == "cpu" else self.device)
            run()
            timer.stop()
            timers.append(timer)
        return statistics.median(timer.seconds() for timer in timers)
