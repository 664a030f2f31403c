"""How long the next step waits for whoever was just answered and may ask again at once."""

from __future__ import annotations

from collections.abc import Callable

from bough.scheduler.costs import Costs, learnt

STEP_SHARE, LONGEST = 0.4, 0.01
"""A wait takes this share of a step of decodes at most, and so many seconds: a stream's next token may come so late."""
SHARE, SAVED = 0.03, 0.1
"""All waits together take this share of the time of steps at most. So many seconds of it can be saved up, as
conversations that have begun together end together."""
LEAST = 0.1
"""Of that share remains so much if nobody comes: now and then it is tried again."""


class Anticipation:
    """Decides on a wait behind each step.

    The next turn of a conversation, or the call after a tool, comes some milliseconds after the answer. If the next
    step has begun by then, it waits for all of that step; and as that one computes somebody's prompt, whoever is
    answered meanwhile is late again. Disks have the same trouble with processes that read one block after the other,
    and wait for the next read (Iyer and Druschel, "Anticipatory scheduling", SOSP 2001): so does the engine, if it was
    worth it lately.

    Attributes:
        patience: seconds that the next step is to wait for a request; 0: none.
    """

    def __init__(self, costs: Costs) -> None:
        self.patience = 0.0
        self._costs = costs
        self._since = 0.0
        self._finished = 0
        self._saved = 0.0
        self._came = False
        self._likely = 1.0

    def arrived(self) -> None:
        """A request has come."""
        self._came = True

    def begin(self, now: float) -> None:
        """A step begins at ``now``, in seconds: the wait before it, if there was one, is over."""
        if self.patience:
            self._saved -= min(now - self._since, self.patience)
            self._likely = learnt(self._likely, self._came)
            self.patience = 0.0

    def end(self, now: float, seconds: float, finished: int, wanted: Callable[[], bool]) -> None:
        """A step that took ``seconds`` has ended at ``now``.

        Args:
            finished: requests that have been answered so far.
            wanted: whether others go on, and who comes now would enter the next step.
        """
        answered, self._finished = finished > self._finished, finished
        self._saved = min(self._saved + SHARE * max(self._likely, LEAST) * seconds, SAVED)
        patience = min(STEP_SHARE * self._costs.step_seconds, LONGEST)
        if answered and self._saved >= patience and wanted():
            self.patience, self._since, self._came = patience, now, False
