"""Gates: asynchronous preconditions of admission.

A grammar that compiles, an adapter that loads, an image that is encoded: whatever is not ready yet holds the
request back here, and nowhere else, while everybody else runs.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from bough.scheduler.req import Req


class GateState(Enum):
    PENDING = "pending"
    READY = "ready"


class Gate(Protocol):
    """One kind of precondition."""

    def start(self, req: Req) -> None:
        """Begin the work for ``req``; raises BoughError when the request can never pass."""
        ...

    def poll(self, req: Req) -> GateState:
        """Look without waiting; raises BoughError when the work failed."""
        ...

    def cancel(self, req: Req) -> None:
        """Forget ``req``, whose work may still run or never began; idempotent."""
        ...


class GateSet:
    """All gates, and the requests that wait before them in order of arrival."""

    def __init__(self, gates: tuple[Gate, ...]) -> None:
        self._gates = gates
        self._held: dict[int, Req] = {}
        self.tokens = 0
        """Of the prompts of all that are held."""

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, req: Req) -> bool:
        """Start every gate for ``req``; False when it can pass at once. Raises what a gate raises, and forgets it."""
        try:
            for gate in self._gates:
                gate.start(req)
            if all(gate.poll(req) is GateState.READY for gate in self._gates):
                return False
        except Exception:
            self.cancel(req)
            raise
        self._held[req.order] = req
        self.tokens += len(req.ids)
        return True

    def poll(self) -> tuple[list[Req], list[tuple[Req, Exception]]]:
        """Requests that may pass now, and those whose gate failed with the reason; both leave the set."""
        ready: list[Req] = []
        failed: list[tuple[Req, Exception]] = []
        for req in list(self._held.values()):
            try:
                if all(gate.poll(req) is GateState.READY for gate in self._gates):
                    ready.append(req)
                    self._release(req)
            except Exception as error:
                self.cancel(req)
                failed.append((req, error))
        return ready, failed

    def cancel(self, req: Req) -> None:
        for gate in self._gates:
            gate.cancel(req)
        self._release(req)

    def _release(self, req: Req) -> None:
        if self._held.pop(req.order, None) is not None:
            self.tokens -= len(req.ids)
