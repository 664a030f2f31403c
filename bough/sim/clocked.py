"""A device that computes nothing and takes as long as a real one: its steps have a price and answers a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from bough.base.plan import Ints, Masks, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a device needs, of which one simulated step may stand for several real ones.

    A real step costs ``step``, ``row`` for each row that decodes and ``token`` for each other token that it computes,
    at most ``chunk`` of them. Simulated tokens stand for ``unit`` real ones each: a row takes ``unit`` real steps to
    decode one.
    """

    step: float
    token: float
    row: float
    unit: int = 1
    chunk: int = 2048

    def of(self, plan: StepPlan) -> float:
        decoding = int(np.count_nonzero(plan.sample & (plan.n_new == 1)))
        extended = (int(plan.n_new.sum()) - decoding) * self.unit
        steps = max(self.unit if decoding else 1, -(-extended // self.chunk))
        return self.step * steps + self.row * decoding * self.unit + self.token * extended


@dataclass(slots=True)
class Time:
    """The clock of a simulation, in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Timed:
    """A step that ends at ``end``; whoever asks for its result waits until then."""

    plan: StepPlan
    end: float
    seconds: float
    tokens: Ints
    time: Time

    def result(self) -> StepResult:
        self.time.now = max(self.time.now, self.end)
        counts = self.plan.sample.astype(np.int32)
        return StepResult(self.plan.step, self.tokens, counts, seconds=self.seconds)


class ClockedDevice:
    """An Executor that moves ``time`` on by the cost of each step, one step after the other.

    ``answers`` holds by seed the ids that a request generates; a request that has generated all of them gets 0.
    ``admitted`` is told the seed of every request when it first gets a row.
    """

    def __init__(
        self, time: Time, cost: Cost, answers: dict[int, Sequence[int]], admitted: Callable[[int], object]
    ) -> None:
        self._time = time
        self._admitted = admitted
        self._known: set[int] = set()
        self._cost = cost
        self._answers = answers
        self._free = 0.0
        self._rows: dict[int, tuple[int, int]] = {}
        self.busy = 0.0
        """Seconds that all steps took."""

    def forward(self, plan: StepPlan) -> Timed:
        for row in plan.released.tolist():
            del self._rows[row]
        for init in plan.admitted:
            self._rows[init.row] = init.seed, init.n_prompt
            if init.seed not in self._known:
                self._known.add(init.seed)
                self._admitted(init.seed)
        seconds = self._cost.of(plan)
        start = max(self._free, self._time.now)
        self._free = start + seconds
        self.busy += seconds
        tokens = [
            self._next(row, position)
            for row, position, sampled in zip(
                plan.rows.tolist(), (plan.start + plan.n_new).tolist(), plan.sample.tolist(), strict=True
            )
            if sampled
        ]
        return Timed(plan, self._free, seconds, np.array(tokens, np.int32), self._time)

    def _next(self, row: int, position: int) -> int:
        seed, n_prompt = self._rows[row]
        answer, index = self._answers[seed], position - n_prompt
        return answer[index] if index < len(answer) else 0

    def sample(self, forward: Timed, masks: Masks | None = None) -> Timed:
        return forward

    def shutdown(self) -> None:
        self._rows.clear()
