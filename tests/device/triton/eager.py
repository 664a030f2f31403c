"""What stands for a captured graph where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Eager:
    """Runs again what was captured, and leaves the result where that lay."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], None]:
        outputs = run()

        def replay() -> None:
            self.replays += 1
            outputs.copy_(run())

        return replay
