"""What control groups of Linux allow a process: its own one and those above it, whose limits bind it too.

Of version 2, or 1; no limit is "max", -1, or more than any machine has.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

UNLIMITED = 1 << 60


class MemoryLimit(NamedTuple):
    """Bytes: that a group may use, that it uses, and that of these are file cache, dropped before any are refused."""

    limit: int
    used: int
    reclaimable: int

    @property
    def left(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - self.used + self.reclaimable)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the tightest group allows, None without a limit. ``root`` is where /proc and /sys hang."""
    quotas = []
    for folder in _folders(root, "cpu"):
        # Both numbers are in one file of version 2, or each is in a file of version 1.
        both = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(folder / "cpu.cfs_period_us")
        numbers = [int(number) for number in both.split() if number.isdecimal()]
        if len(numbers) == 2 and numbers[1] > 0:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def within_quota(n: int, root: Path = Path("/")) -> int:
    """``n`` CPUs, or those of them that the quota leaves, at least one."""
    quota = cpu_quota(root)
    return n if quota is None else min(n, max(1, int(quota)))


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Of all groups that have one."""
    limits = []
    for folder in _folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is not None and limit < UNLIMITED:
            limits.append(MemoryLimit(limit, used, _reclaimable(folder)))
    return limits


def free_memory(root: Path = Path("/")) -> int:
    """Bytes available without swapping, within those limits; UNLIMITED where Linux says nothing."""
    available = UNLIMITED
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    return min([available, *(limit.left for limit in memory_limits(root))])


def _folders(root: Path, controller: str) -> list[Path]:
    folders = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, entry = line.partition(":")
        controllers, _, path = entry.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # What is mounted together in version 1 may be listed in another order than its folder's; links name each.
        for name in {controllers, controller} if controllers else {""}:
            base = root / "sys/fs/cgroup" / name
            group = base / path.strip("/")
            folders += [group, *(p for p in group.parents if p.is_relative_to(base))]
    return folders


def _reclaimable(folder: Path) -> int:
    names = ("inactive_file", "total_inactive_file")
    found = (line.partition(" ") for line in _read(folder / "memory.stat").splitlines())
    return max((int(value) for name, _, value in found if name in names and value.isdecimal()), default=0)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
