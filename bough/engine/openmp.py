"""How OpenMP's threads wait for each other; imported before torch, which loads the library that reads it."""

from __future__ import annotations

import os

SPINS = "5000"
"""Enough to last from one kernel of a step to the next: a half of it makes the steps of a small model slower."""


def wait_briefly() -> None:
    """Let a thread that waits spin for :data:`SPINS` rounds and then sleep, unless the environment says otherwise.

    GNU OpenMP's own default spins much longer and gains nothing when the cores are free. When another program
    takes one of them, it burns the time that the thread waited for needs, and a step takes more than ten times
    as long. Without effect once torch has been imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
