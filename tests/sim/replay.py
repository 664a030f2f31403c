"""Run a script, say how it failed, and find a smaller script that fails in the same way."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace

from .pipeline import Violation
from .script import Event, Script
from .simulation import Simulation

MAX_RUNS = 600
"""Runs that shrinking may take."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``kind`` is the invariant, or the type of an exception that the code under test raised."""

    kind: str
    text: str
    step: int
    where: str


def failure(script: Script, trace: bool = False) -> Failure | None:
    """How ``script`` fails; None when all is well."""
    simulation = Simulation(script, trace)
    try:
        simulation.run()
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/sim/" not in f.filename]
        where = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "the checks"
        kind = error.name if isinstance(error, Violation) else type(error).__name__
        return Failure(kind, str(error), simulation.steps, where)
    return None


def shrink(script: Script, kind: str) -> Script:
    """Drop events as long as the script fails with ``kind`` (delta debugging, Zeller and Hildebrandt 2002)."""
    events, runs, size = script.events, 0, max(1, len(script.events) // 2)
    while runs < MAX_RUNS:
        begin, smaller = 0, False
        while begin < len(events) and runs < MAX_RUNS:
            fewer: list[Event] = events[:begin] + events[begin + size :]
            runs += 1
            found = failure(replace(script, events=fewer))
            if found is not None and found.kind == kind:
                events, smaller = fewer, True
            else:
                begin += size
        if size == 1 and not smaller:
            break
        size = max(1, size // 2)
    return replace(script, events=events)
