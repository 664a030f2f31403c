"""What the rest of the device column may ask about a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Platform(Protocol):
    """Facts about one device.

    Attributes:
        name: of the kind, e.g. "cpu".
        device: the torch device.
        threads: compute threads on the host side.
    """

    name: str
    device: torch.device
    threads: int

    def free_memory(self) -> int:
        """Bytes that may still be allocated on the device."""
        ...

    def features(self) -> tuple[str, ...]:
        """Names of the instruction sets or capabilities that kernels choose by."""
        ...

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes of the device that ``run`` takes beside what is allocated; 0 where they are the system's to find."""
        ...
