"""Gates that a script opens, and what they let through."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.base.errors import InvalidRequest
from bough.scheduler.gates import GateState
from bough.scheduler.req import Req

from .script import Arrive

if TYPE_CHECKING:
    from .simulation import Simulation


class ScriptedGate:
    """A Gate that opens, fails or refuses when the script says so."""

    def __init__(self, index: int, arrivals: dict[int, Arrive], clock: Simulation) -> None:
        self._index = index
        self._arrivals = arrivals
        self._clock = clock
        self.work: dict[int, int] = {}
        """By order of the request: the step at which it may pass."""

    def _plan(self, req: Req) -> tuple[int, bool]:
        gates = self._arrivals[req.seed].gates
        return gates[self._index] if self._index < len(gates) else (0, False)

    def start(self, req: Req) -> None:
        delay, _ = self._plan(req)
        if delay < 0:
            raise InvalidRequest("the gate refuses")
        self.work[req.order] = self._clock.steps + delay

    def poll(self, req: Req) -> GateState:
        if self._clock.steps < self.work.get(req.order, 0):
            return GateState.PENDING
        if req.order in self.work and self._plan(req)[1]:
            raise InvalidRequest("the gate failed")
        self.work.pop(req.order, None)
        return GateState.READY

    def cancel(self, req: Req) -> None:
        self.work.pop(req.order, None)


def refused_by_gates(arrival: Arrive) -> bool:
    """A gate refuses, or fails at once and stands before every gate that is not open yet."""
    if any(delay < 0 for delay, _ in arrival.gates):
        return True
    for delay, fails in arrival.gates:
        if delay or fails:
            return fails and not delay
    return False
