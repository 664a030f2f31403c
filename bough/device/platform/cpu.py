"""The CPU as a device: threads, memory, instruction sets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

FEATURES = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx_vnni",
            "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")  # fmt: skip

UNLIMITED = 1 << 60

TILE_LEAF = 0x1D
"""Of CPUID, which describes the tiles of AMX."""


def usable_processors(root: Path = Path("/")) -> int:
    """Processors that this process may run on, less what the quotas of its control groups forbid."""
    n = len(os.sched_getaffinity(0))
    for folder in _groups(root, "cpu"):
        # Both of version 2, or one in a file of version 1; no quota is "max", or -1.
        both = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")
        numbers = [int(number) for number in both.split() if number.isdecimal()]
        if len(numbers) == 2 and numbers[1] > 0:
            n = min(n, max(1, numbers[0] // numbers[1]))
    return n


def spare_onednn(root: Path = Path("/")) -> None:
    """Keep torch's oneDNN from tiles (AMX) whose sizes the processor does not tell, before it multiplies anything.

    It takes the sizes from leaf 0x1d of CPUID; where a hypervisor offers AMX and ends before that leaf, its first
    product of bfloat16 ends the process with SIGILL. A limit that the user has set stands.
    """
    info = _processor(root)
    level = info.get("cpuid level", "")
    if "amx_tile" in info.get("flags", "").split() and level.isdecimal() and int(level) < TILE_LEAF:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


class CpuPlatform:
    """:class:`bough.device.platform.base.Platform` of this machine's processors."""

    name = "cpu"

    def __init__(self, threads: int | None = None, root: Path = Path("/")) -> None:
        """``threads`` becomes torch's and the kernels' number; all usable processors by default.

        ``root`` is where /proc and /sys hang.
        """
        self.device = torch.device("cpu")
        self._root = root
        spare_onednn(root)
        self.threads = threads or usable_processors(root)
        torch.set_num_threads(self.threads)

    def free_memory(self) -> int:
        """Bytes available without swapping, within the limit of the control group."""
        available = UNLIMITED
        for line in self._read("proc/meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        for folder in _groups(self._root, "memory"):
            limit = self._number(folder / "memory.max") or self._number(folder / "memory.limit_in_bytes")
            used = self._number(folder / "memory.current") or self._number(folder / "memory.usage_in_bytes")
            if limit is not None and limit < UNLIMITED:
                available = min(available, max(0, limit - (used or 0) + self._reclaimable(folder)))
        return available

    def features(self) -> tuple[str, ...]:
        info = _processor(self._root)
        flags = set(info.get("flags", info.get("Features", "")).split())
        return tuple(name for name in FEATURES if name in flags)

    def peak(self, run: Callable[[], object]) -> int:
        return 0

    def _reclaimable(self, folder: Path) -> int:
        """File cache that the kernel drops before it refuses memory."""
        names = ("inactive_file", "total_inactive_file")
        found = [line.split() for line in self._read(folder / "memory.stat").splitlines()]
        return max((int(value) for name, value in found if name in names), default=0)

    def _number(self, path: Path) -> int | None:
        text = self._read(path).strip()
        return int(text) if text.isdecimal() else None

    def _read(self, path: str | Path) -> str:
        return _read(self._root / path)


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the process's control group and of those above it, whose limits bind it too; version 2 or 1."""
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        group = base / path.strip("/")
        folders += [group, *(p for p in group.parents if p.is_relative_to(base))]
    return folders


def _processor(root: Path) -> dict[str, str]:
    """What Linux says of the first processor."""
    first = _read(root / "proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
