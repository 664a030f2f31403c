"""Executors: how the scheduler's plans reach a worker in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from bough.base.errors import DeviceLost
from bough.base.plan import Executor, Masks, StepPlan, StepResult
from bough.device.platform.cuda import lost
from bough.worker.build import BuiltWorker
from bough.worker.worker import ForwardHandle, Launched, Worker


class WorkerExecutor(Executor[Any], Protocol):
    """An executor of a worker that it has built.

    Attributes:
        built: the worker, and what its making found out.
    """

    built: BuiltWorker

    def call(self, work: Callable[[Worker], None]) -> Future[None]:
        """Run ``work`` between two steps, behind everything that was launched. For the thread that launches them."""
        ...


class LocalExecutor:
    """One worker, driven by one thread of its own, so that the host plans while the CPU computes.

    That pays where the CPU has a core to spare; elsewhere :class:`StreamExecutor` saves the wake-ups of two threads for
    each other. The thread also builds the worker and nothing else in the process computes: OpenMP keeps a team of
    threads for each thread that has ever computed, and once there are more of them than cores it puts them to sleep
    between kernels, which more than doubles the time of a small model's step.

    An exception of a step surfaces in :meth:`concurrent.futures.Future.result`, at the commit.

    Attributes:
        built: the worker, and what its making found out.
    """

    def __init__(self, build: Callable[[], BuiltWorker]) -> None:
        """Raises what ``build`` raises."""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        try:
            self.built = self._thread.submit(build).result()
        except BaseException:
            self.shutdown()
            raise

    def forward(self, plan: StepPlan) -> Future[ForwardHandle]:
        return self._thread.submit(self.built.worker.forward, plan)

    def sample(self, forward: Future[ForwardHandle], masks: Masks | None) -> Future[StepResult]:
        return self._thread.submit(lambda: self.built.worker.sample(forward.result(), masks))

    def call(self, work: Callable[[Worker], None]) -> Future[None]:
        """Run ``work`` between two steps, behind everything that was launched."""
        return self._thread.submit(lambda: work(self.built.worker))

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that the device computes, or an error that kept it from being launched."""

    worker: Worker
    launched: Launched | Exception

    def result(self) -> StepResult:
        try:
            if isinstance(self.launched, Exception):
                raise self.launched
            return self.worker.finish(self.launched)
        except Exception as error:
            if lost(error):
                raise DeviceLost(f"the GPU cannot be used any more: {str(error).splitlines()[0]}") from error
            raise


class StreamExecutor:
    """One worker, driven by the thread that asks: launches on a device that computes by itself do not wait.

    On a CPU a launch computes at once, which is right for depth 0; that thread has to be the one that builds, and the
    only one that computes, see :class:`LocalExecutor`. On a GPU a step is waited for where its result is asked for, and
    then only for its own tokens, which have travelled to the host while later steps compute. Errors after which the
    device is of no use to the process are raised as DeviceLost.

    Attributes:
        built: the worker, and what its making found out.
    """

    def __init__(self, build: Callable[[], BuiltWorker]) -> None:
        """Raises what ``build`` raises."""
        self.built = build()

    def forward(self, plan: StepPlan) -> ForwardHandle | Exception:
        try:
            return self.built.worker.forward(plan)
        except Exception as error:
            return error

    def sample(self, forward: ForwardHandle | Exception, masks: Masks | None) -> _Step:
        worker = self.built.worker
        if isinstance(forward, Exception):
            return _Step(worker, forward)
        try:
            return _Step(worker, worker.launch(forward, masks))
        except Exception as error:
            return _Step(worker, error)

    def call(self, work: Callable[[Worker], None]) -> Future[None]:
        """Run ``work`` now, which is between two launches; the device does it behind all that was launched."""
        done: Future[None] = Future()
        try:
            work(self.built.worker)
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        """Nothing runs that nobody waits for."""
