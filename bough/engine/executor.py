"""Executors: how the scheduler's plans reach a worker in this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from bough.base.plan import StepPlan, StepResult
from bough.worker.worker import ForwardHandle


class PlanRunner(Protocol):
    """The synchronous core of a worker (:class:`bough.worker.worker.Worker`)."""

    def forward(self, plan: StepPlan) -> ForwardHandle: ...

    def sample(self, handle: ForwardHandle) -> StepResult: ...


class LocalExecutor:
    """One worker, driven by one thread of its own, so that the host plans while the device computes.

    With depth 0 the scheduler waits for each step at once and nothing overlaps. An exception of a step
    surfaces in :meth:`concurrent.futures.Future.result`, at the commit.
    """

    def __init__(self, worker: PlanRunner) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    def forward(self, plan: StepPlan) -> Future[ForwardHandle]:
        return self._thread.submit(self._worker.forward, plan)

    def sample(self, forward: Future[ForwardHandle]) -> Future[StepResult]:
        return self._thread.submit(lambda: self._worker.sample(forward.result()))

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
