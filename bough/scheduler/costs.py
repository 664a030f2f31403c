"""What steps and programs have cost so far: durations to show, and means by which what is worth it is reckoned."""

from __future__ import annotations

from dataclasses import dataclass

LEARNING = 0.2
"""Weight of the latest step, or pause, in the running mean of them."""
LEARNING_ANSWERS = 0.05
"""The same for the lengths of answers, which differ more."""
PAUSE = 1.0
"""Seconds that a program is expected to stay away before anything is known."""


@dataclass(slots=True)
class Timings:
    """Durations of the steps since they were last read, in seconds, and the tokens they computed."""

    step: list[float]
    device: list[float]
    tokens: list[int]


class Costs:
    """Running means.

    Attributes:
        token_seconds: of computing a token of a prompt anew; 0 until one was computed.
        step_seconds: of a step that decodes; 0 before the first.
        answer: tokens that a request of a program generates; 0 before the first has ended.
        pause: seconds that a program stays away between two requests.
    """

    def __init__(self) -> None:
        self.token_seconds = self.step_seconds = self.answer = 0.0
        self.pause = PAUSE

    def step(self, seconds: float, n_tokens: int, n_rows: int) -> None:
        """A step of ``n_rows`` rows computed ``n_tokens``."""
        if n_tokens >= 4 * n_rows:
            self.token_seconds = learnt(self.token_seconds or None, seconds / n_tokens)
        elif n_tokens < 2 * n_rows:  # what is between them is neither
            self.step_seconds = learnt(self.step_seconds or None, seconds)

    def answered(self, n_tokens: int) -> None:
        """A request of a program has ended."""
        self.answer = learnt(self.answer or None, n_tokens, LEARNING_ANSWERS)

    def gain(self, n_rows: int) -> float:
        """Seconds that are won when an answer is decoded beside ``n_rows`` others, which share the cost of its steps.

        A row's share of a step of n rows is 1 / n of it. With one row more that is less by 1 / n (n + 1) for each of
        the n, for as many steps as the answer has tokens. What a row costs by itself is not told from what the step
        costs, so this is an upper bound; it falls as rows are added.
        """
        return self.answer * self.step_seconds / (n_rows + 1)


def learnt(mean: float | None, latest: float, weight: float = LEARNING) -> float:
    """The running mean with ``latest`` in it; None is that of nothing."""
    return latest if mean is None else mean + weight * (latest - mean)
