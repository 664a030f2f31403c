"""The processors of this machine, as Linux describes them, and the cores that they are."""

from __future__ import annotations

import os
from pathlib import Path


def cpuinfo(root: Path = Path("/")) -> list[dict[str, str]]:
    """The fields of every processor, none where Linux says nothing. ``root`` is where /proc hangs."""
    try:
        blocks = (root / "proc/cpuinfo").read_text(errors="replace").strip().split("\n\n")
    except OSError:
        return []
    pairs = ((line.partition(":") for line in block.splitlines()) for block in blocks)
    return [{key.strip(): value.strip() for key, _, value in block} for block in pairs]


def flags(root: Path = Path("/")) -> frozenset[str]:
    """What the first processor can do, in Linux's words."""
    first = next(iter(cpuinfo(root)), {})
    return frozenset((first.get("flags") or first.get("Features") or "").split())


def usable_cores(root: Path = Path("/")) -> int:
    """Cores of the processors that this process may run on: those of one core share what kernels keep busy."""
    allowed = {str(n) for n in os.sched_getaffinity(0)}
    of_each = (p for p in cpuinfo(root) if p.get("processor") in allowed)
    return len({(p.get("physical id"), p.get("core id", p["processor"])) for p in of_each}) or len(allowed)
