"""A fake device that computes later than it is told to, as a GPU does."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from bough.base.plan import Ints, Masks, StepPlan, StepResult
from bough.sim.device import FakeDevice, Launched


@dataclass(frozen=True, slots=True)
class _Forward:
    launched: Launched


@dataclass(frozen=True, slots=True)
class _Sampling:
    launched: Launched
    masks: Masks | None


@dataclass(frozen=True, slots=True)
class _Poison:
    locs: Ints
    window: bool


@dataclass(frozen=True, slots=True)
class LateStep:
    """A step that the device has yet to compute, or has computed; asking for its result waits for it."""

    device: LateDevice
    launched: Launched

    def result(self) -> StepResult:
        return self.device.result(self.launched)


class LateDevice:
    """An Executor that lets ``device`` fall up to ``lag`` forwards behind what was launched.

    All that changes the device goes through one queue, as on a stream: it happens behind what was launched before it,
    and reads plans and masks only then. A result is there once everything up to its sampling was done.

    Attributes:
        device: as far as it has come.
        overtaken: forwards that were computed when a later plan had been launched already.
    """

    def __init__(self, device: FakeDevice, lag: int) -> None:
        self.device = device
        self.overtaken = 0
        self._lag = lag
        self._queue: deque[_Forward | _Sampling | _Poison] = deque()

    def forward(self, plan: StepPlan) -> LateStep:
        launched = self.device.order(plan)
        self._queue.append(_Forward(launched))
        self._catch_up()
        return LateStep(self, launched)

    def sample(self, forward: LateStep, masks: Masks | None = None) -> LateStep:
        self._queue.append(_Sampling(forward.launched, masks))
        self._catch_up()
        return forward

    def poison(self, locs: Ints, window: bool = False) -> None:
        """See :meth:`FakeDevice.poison`."""
        self._queue.append(_Poison(locs, window))
        self._catch_up()

    def result(self, launched: Launched) -> StepResult:
        """Of a step that was sampled, or whose forward fails."""
        while launched.outcome is None:
            self._advance()
        return launched.result()

    def shutdown(self) -> None:
        self._queue.clear()
        self.device.shutdown()

    def caught_up(self) -> FakeDevice:
        """The device as it will be when everything that was launched is done; a copy where something is not."""
        if not self._queue:
            return self.device
        device = self.device.copy()
        twins: dict[int, Launched] = {}
        for work in self._queue:
            if isinstance(work, _Poison):
                device.poison(work.locs, work.window)
                continue
            twin = twins.setdefault(work.launched.plan.step, replace(work.launched))
            if isinstance(work, _Forward):
                device.compute(twin)
            else:
                device.sample(twin, work.masks)
        return device

    def _catch_up(self) -> None:
        while self._queue and (not self._lag or self._forwards() > self._lag):
            self._advance()

    def _forwards(self) -> int:
        return sum(isinstance(work, _Forward) for work in self._queue)

    def _advance(self) -> None:
        work = self._queue.popleft()
        match work:
            case _Forward(launched):
                self.overtaken += self._forwards() > 0
                self.device.compute(launched)
            case _Sampling(launched, masks):
                self.device.sample(launched, masks)
            case _Poison(locs, window):
                self.device.poison(locs, window)
