"""How OpenMP's threads wait for each other; imported before torch, which loads the library that reads it."""

from __future__ import annotations

import os

SPINS = "5000"
"""Some 10 microseconds, about the time between two kernels of a step."""


def wait_briefly() -> None:
    """Let a thread that waits spin for :data:`SPINS` rounds and then sleep, unless the environment says otherwise.

    GNU OpenMP's own 300,000 rounds gain nothing when the cores are free. When another program takes one of
    them, they burn the time that the thread waited for needs, and a step takes twenty times as long. Without
    effect once torch has been imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
