"""Copies between the host and a device that neither of them waits for, and time as the device spends it.

On a CPU a copy is a copy. On CUDA it goes through pinned memory: a block is used again only after the copies out of it
are done, which torch's allocator of pinned memory keeps track of. Results travel on a stream of their own, so that
they arrive while the next step computes.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Tensor = torch.Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``values`` on ``device``; ``values`` may be changed as soon as this returns."""
    if device.type == "cpu":
        return torch.tensor(values)
    pinned = torch.empty(values.shape, dtype=_torch_dtype(values.dtype), pin_memory=True)
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True)


def fill(target: Tensor, values: NDArray[Any]) -> None:
    """Copy ``values`` [n] over the first n numbers of ``target``; ``values`` may be changed as soon as this returns."""
    if target.device.type == "cpu":
        target[: len(values)] = torch.from_numpy(values)
        return
    pinned = torch.empty(values.shape, dtype=target.dtype, pin_memory=True)
    pinned.numpy()[...] = values
    target[: len(values)].copy_(pinned, non_blocking=True)


class Fetch:
    """Tensors, at least one, on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts the copies behind what the current stream has yet to do."""
        self._event: torch.cuda.Event | None = None
        self._arrays: list[NDArray[Any]] = []
        if tensors[0].device.type == "cpu":
            self._arrays = [tensor.numpy().copy() for tensor in tensors]
            return
        device = tensors[0].device
        stream, current = _copy_stream(device), torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            copies = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            self._arrays = [copy.numpy() for copy in copies]
            for copy, tensor in zip(copies, tensors):
                copy.copy_(tensor, non_blocking=True)
                # Its memory may be given to others only when the copy is done.
                tensor.record_stream(stream)
            self._event = stream.record_event()

    def arrays(self) -> list[NDArray[Any]]:
        """The tensors, once they have arrived; valid as long as this object."""
        if self._event is not None:
            self._event.synchronize()
        return self._arrays


class Passed:
    """What a device had to do so far, for memory of the host's that it reads and that is written again."""

    def __init__(self, device: torch.device) -> None:
        """Everything that was launched in the current stream before."""
        self._event = None if device.type == "cpu" else torch.cuda.current_stream(device).record_event()

    def wait(self) -> None:
        """Until it is done."""
        if self._event is not None:
            self._event.synchronize()


class Timer:
    """Seconds that a device spends on what is launched between two calls."""

    def __init__(self, device: torch.device | None) -> None:
        """Starts. ``device`` is one that computes by itself, or None, where the host does."""
        self._device = device
        self.start()

    def start(self) -> None:
        """Start again: what was launched before does not count."""
        self._start = self._end = self._mark()

    def stop(self) -> None:
        """What is launched from here on does not count."""
        self._end = self._mark()

    def seconds(self) -> float:
        """Once what was launched before ``stop`` is done; waits for it."""
        if self._device is None:
            return float(self._end - self._start)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3

    def since(self, earlier: Timer) -> float:
        """Seconds between the end of ``earlier`` and this start, in which nothing was to do; once both are done."""
        if self._device is None:
            return float(self._start - earlier._end)
        return max(0.0, float(earlier._end.elapsed_time(self._start)) / 1e3)

    def _mark(self) -> Any:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own is not annotated
        event.record(torch.cuda.current_stream(self._device))
        return event


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own is not annotated


@cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
