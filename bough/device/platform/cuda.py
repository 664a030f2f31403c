"""A CUDA device: memory, capabilities."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from bough.base.errors import ConfigError

FEATURES = {"bf16": (8, 0), "fp8": (8, 9), "wgmma": (9, 0)}
"""What kernels choose by -> the first compute capability that has it."""


class CudaPlatform:
    """:class:`bough.device.platform.base.Platform` of one GPU."""

    name = "cuda"
    threads = 1

    def __init__(self, index: int = 0) -> None:
        """Raises ConfigError where there is no such device, or it is older than the kernels."""
        if not torch.cuda.is_available():
            raise ConfigError(f"no CUDA device: {why_not()}", param="device")
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        if not self.features():
            raise ConfigError(
                f"{torch.cuda.get_device_name(self.device)} is older than compute capability 8.0", param="device"
            )
        # The host only launches; threads of torch's would wake up for nothing.
        torch.set_num_threads(1)

    def free_memory(self) -> int:
        """Bytes that may still be allocated: what the driver has left, and what torch holds without using it."""
        free, _ = torch.cuda.mem_get_info(self.device)
        idle = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(free + idle)

    def features(self) -> tuple[str, ...]:
        capability = torch.cuda.get_device_capability(self.device)
        return tuple(name for name, first in FEATURES.items() if capability >= first)

    def peak(self, run: Callable[[], object]) -> int:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def why_not() -> str:
    """Why this process has no CUDA device, for people."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return "torch finds no NVIDIA driver or no device"


def device_of(asked: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """ "cpu" or "cuda" for ``--device``: "auto" is a GPU where torch finds one that the kernels know, and Triton."""
    if asked != "auto":
        return asked
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < FEATURES["bf16"]:
        return "cpu"
    return "cpu" if find_spec("triton") is None else "cuda"


def lacks_compiler() -> bool:
    """Whether Triton finds no C compiler, or no headers of Python: it builds what launches a kernel, beside the kernel,
    unless its cache has both."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return compiler is None or not headers.is_file()


def lost(error: Exception) -> bool:
    """Whether ``error``, raised by a launch or by waiting for one, leaves this process without its device.

    After an illegal access or a failed launch every later call fails, too (CUDA programming guide, "Error Checking");
    memory that could not be had is no such error.
    """
    text = str(error)
    return text.startswith(("CUDA error", "Triton Error [CUDA]")) and "out of memory" not in text
