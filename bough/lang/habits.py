"""What the runs of a program append after each of its calls, as far as they agree."""

from __future__ import annotations

import os.path
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bough.lang.program import Line

Place = tuple["Line | None", "str | None"]
"""A call in the source: its line and the name of its variable."""

RUNS = 2
"""What was seen less often is not known to be constant."""
SHORTEST = 16
"""Characters; less is not worth telling the engine."""
LONGEST = 16384
"""Characters of a text that are remembered."""


class Habits:
    """Shared by all runs of a program. Safe from any thread.

    A text is constant that every run, and every turn of a loop, has appended so far. Running the body with symbols
    would call its tools, so nothing is told before it was seen.
    """

    def __init__(self) -> None:
        self._seen: dict[Place, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def learn(self, place: Place, appended: str) -> None:
        """``appended`` stood between the answer at ``place`` and the next call."""
        with self._lock:
            before, n = self._seen.get(place, (appended[:LONGEST], 0))
            self._seen[place] = os.path.commonprefix([before, appended]), n + 1

    def after(self, place: Place) -> str:
        """What will follow the answer at ``place``; empty where that is not known."""
        text, n = self._seen.get(place, ("", 0))
        return text if n >= RUNS and len(text) >= SHORTEST else ""
