"""What the runs of a program do after each of its calls: what they append, as far as they agree, and after how long."""

from __future__ import annotations

import os.path
import threading
from dataclasses import dataclass
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
PLACES = 256
"""Places that are remembered, the latest: names that a program makes up are without end."""
LEARNING = 0.3
"""Weight of the latest pause in the running mean of them."""


@dataclass(slots=True)
class Answered:
    """The latest answer of a state, which the states that were copied from it share.

    Attributes:
        place: the call that it answers.
        length: of the text behind it.
        at: clock reading when it came; None once a call of the program has followed it.
    """

    place: Place
    length: int
    at: float | None


class Habits:
    """Shared by all runs of a program. Safe from any thread.

    A text is constant that every run, and every turn of a loop, has appended so far. Running the body with symbols
    would call its tools, so nothing is told before it was seen. A tool is known by its name, since its function may be
    another one in each run.
    """

    def __init__(self) -> None:
        self._seen: dict[Place, tuple[str, int]] = {}
        self._pauses: dict[Place | str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def learn(self, place: Place, appended: str) -> None:
        """``appended`` stood between the answer at ``place`` and the next call."""
        with self._lock:
            before, n = self._seen.pop(place, (appended[:LONGEST], 0))
            self._seen[place] = os.path.commonprefix([before, appended]), n + 1
            if len(self._seen) > PLACES:
                del self._seen[next(iter(self._seen))]

    def after(self, place: Place) -> str:
        """What will follow the answer at ``place``; empty where that is not known."""
        text, n = self._seen.get(place, ("", 0))
        return text if n >= RUNS and len(text) >= SHORTEST else ""

    def paused(self, where: Place | str, seconds: float) -> None:
        """So long was it from the answer at a place to the next call, or did a call of a tool take."""
        with self._lock:
            mean, n = self._pauses.pop(where, (seconds, 0))
            self._pauses[where] = mean + LEARNING * (seconds - mean), n + 1
            if len(self._pauses) > PLACES:
                del self._pauses[next(iter(self._pauses))]

    def pause(self, where: Place | str) -> tuple[float | None, int]:
        """(running mean of the seconds, None of nothing; how often they were measured)."""
        return self._pauses.get(where, (None, 0))
