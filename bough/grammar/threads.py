"""Threads for what grammars take: those that compute without Python, and those that need its lock, give way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

NICENESS = 19
STACK = 1 << 30
"""Address space, of which only what is used takes memory: compiling recurses along references, and a constraint of
the largest size allowed gets through with this, where the usual 8 MiB end the process."""


def native_threads(n: int) -> ThreadPoolExecutor:
    """``n`` threads of the lowest priority, with large stacks.

    For calls that let go of Python's lock at once, and for nothing else: a thread that gives way to others while it
    holds the lock makes everybody wait who needs it.
    """
    threads = ThreadPoolExecutor(n, "grammar-native", _be_nice)
    started = threading.Barrier(n)
    before = threading.stack_size(STACK)
    try:
        for _ in range(n):  # each waits for the others, so that all of them are made now
            threads.submit(started.wait)
    finally:
        threading.stack_size(before)
    return threads


PAUSE_SECONDS = 0.0005
"""Between two steps of a thread that needs Python's lock. The engine takes the lock dozens of times for a token, and
would wait for it each time, for as long as the interpreter lets a thread keep it."""


def in_pauses(steps: Iterable[None]) -> None:
    """Go through ``steps``, each of which needs Python's lock, and leave the lock to others in between."""
    for _ in steps:
        time.sleep(PAUSE_SECONDS)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
