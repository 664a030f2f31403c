"""How long the next step waits for whoever was just answered and may ask again at once."""

from __future__ import annotations

from collections.abc import Callable

from bough.base.messages import Waits
from bough.base.program import Program
from bough.scheduler.costs import Costs, learnt

STEP_SHARE, LONGEST = 0.5, 0.01
"""A wait takes this share of a step of decodes at most, and so many seconds: a stream's next token may come so late."""
SHARE, SAVED = 0.03, 0.1
"""All waits together take this share of the time at most, idle or not. So many seconds of it can be saved up, fewer if
few came lately: conversations that have begun together end together."""
LEAST = 0.1
"""Of that share remains so much if nobody comes: now and then it is tried again."""


class Anticipation:
    """Decides on a wait before each step.

    The next turn of a conversation, or the call after a tool, comes some milliseconds after the answer. If the next
    step has begun by then, it waits for all of that step; and as that one computes somebody's prompt, whoever is
    answered meanwhile is late again. Disks have the same trouble with processes that read one block after the other,
    and wait for the next read (Iyer and Druschel, "Anticipatory scheduling", SOSP 2001): so does the engine, if it was
    worth it lately.
    """

    def __init__(self, costs: Costs, now: float) -> None:
        self._costs = costs
        self._answered = self._came = False
        self._since, self._until = now, 0.0
        """Of the wait that is going on; 0: none is."""
        self._saved, self._reckoned = 0.0, now
        self._likely = 1.0
        """Share of the waits, lately, in which somebody came."""
        self.waits = Waits()

    def answered(self, program: Program | None) -> None:
        """A request of ``program`` was ended by a step. Who is known to stay away is not waited for."""
        if program is None or not (program.end or (program.pause or 0.0) > LONGEST):
            self._answered = True

    def arrived(self) -> None:
        """A request has come."""
        self._came = True

    def left(self, now: float, wanted: Callable[[], bool]) -> float:
        """Seconds that the next step is to wait from ``now`` on, or 0.

        To be asked when all that was there has been received, and again behind each wait, however it ended.

        Args:
            wanted: whether others go on, and who comes now would enter the next step.
        """
        if not self._until:
            answered, self._answered = self._answered, False
            if not answered:
                return 0.0
            self._saved += SHARE * max(self._likely, LEAST) * (now - self._reckoned)
            self._saved = min(self._saved, max(SAVED * self._likely, LONGEST))
            self._reckoned = now
            patience = _whole(min(STEP_SHARE * self._costs.step_seconds, LONGEST))
            if not 0 < patience <= self._saved or not wanted():
                return 0.0
            self._since, self._until, self._came = now, now + patience, False
            return patience
        rest = _whole(self._until - now)
        if rest > 0 and not self._came and wanted():
            return rest
        waited, waits = now - self._since, self.waits
        # A machine that stood still in between is no reason to wait for nobody for days.
        self._saved = max(self._saved - waited, -SAVED)
        self.waits = Waits(ended=waits.ended + 1, worth=waits.worth + self._came, seconds=waits.seconds + waited)
        if self._came or rest <= 0:
            self._likely = learnt(self._likely, self._came)
        self._until = 0.0
        return 0.0


def _whole(seconds: float) -> float:
    """Whole milliseconds of them, as systems wait: what is shorter would become one."""
    return int(seconds * 1e3 + 1e-6) / 1e3
