"""The CPU as a device: threads, memory, instruction sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from bough.base.control_groups import free_memory, within_quota
from bough.base.processors import cpuinfo, flags, usable_cores

FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx_vnni",
            "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")  # fmt: skip

TILE_LEAF = 0x1D
"""Of CPUID, which describes the tiles of AMX."""


def usable_processors(root: Path = Path("/")) -> int:
    """Processors that this process may run on, less what the quotas of its control groups forbid."""
    return within_quota(len(os.sched_getaffinity(0)), root)


def default_threads(root: Path = Path("/")) -> int:
    """One for each core that those processors are."""
    return within_quota(usable_cores(root), root)


def spare_onednn(root: Path = Path("/")) -> None:
    """Keep torch's oneDNN from tiles (AMX) whose sizes the processor does not tell, before it multiplies anything.

    It takes the sizes from leaf 0x1d of CPUID; where a hypervisor offers AMX and ends before that leaf, its first
    product of bfloat16 ends the process with SIGILL. A limit that the user has set stands.
    """
    level = next(iter(cpuinfo(root)), {}).get("cpuid level", "")
    if "amx_tile" in flags(root) and level.isdecimal() and int(level) < TILE_LEAF:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


class CpuPlatform:
    """:class:`bough.device.platform.base.Platform` of this machine's processors."""

    name = "cpu"

    def __init__(self, threads: int | None = None, root: Path = Path("/")) -> None:
        """``threads`` becomes torch's and the kernels' number; one for each core by default.

        ``root`` is where /proc and /sys hang.
        """
        self.device = torch.device("cpu")
        self._root = root
        spare_onednn(root)
        self.threads = threads or default_threads(root)
        torch.set_num_threads(self.threads)

    def free_memory(self) -> int:
        """Bytes available without swapping, within the limit of the control group."""
        return free_memory(self._root)

    def features(self) -> tuple[str, ...]:
        return features(self._root)

    def peak(self, run: Callable[[], object]) -> int:
        return 0


def features(root: Path = Path("/")) -> tuple[str, ...]:
    """Those of the first processor that kernels choose by."""
    found = flags(root)
    return tuple(name for name in FEATURES if name in found)
