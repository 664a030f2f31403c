"""Facts about the machine, from ``/proc``, ``/sys`` and package metadata; nothing heavy is imported."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bough.base.control_groups import cpu_quota, memory_limits
from bough.base.processors import cpuinfo, flags, usable_cores

FEATURES = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8", "asimddp",
)  # fmt: skip
"""CPU features that kernels care about, as Linux names them (x86, then ARM)."""

PACKAGES = ("torch", "numpy", "msgspec", "fastapi", "uvicorn", "tokenizers", "transformers")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor as this process may use it.

    Attributes:
        model: the vendor's name.
        features: those of :data:`FEATURES` that it has.
        cores: physical cores among the usable threads.
        threads: hardware threads that the affinity mask allows.
        quota: CPUs that the control group allows, None without a limit.
    """

    model: str
    features: tuple[str, ...]
    cores: int
    threads: int
    quota: float | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the machine, what this process may still take, and the control group's limit (None without one)."""

    total: int
    usable: int
    limit: int | None


def cpu(root: Path = Path("/")) -> Cpu:
    """Read the processor's facts; missing files give "unknown", no features and no quota. ``root`` is where /proc and
    /sys hang."""
    first = next(iter(cpuinfo(root)), {})
    found = flags(root)
    return Cpu(
        model=first.get("model name") or platform.processor() or platform.machine() or "unknown",
        features=tuple(name for name in FEATURES if name in found),
        cores=usable_cores(root),
        threads=len(os.sched_getaffinity(0)),
        quota=cpu_quota(root),
    )


def memory(root: Path = Path("/")) -> Memory:
    """Read the memory's facts; a missing file counts as 0 bytes or no limit."""
    info = _fields(_read(root / "proc/meminfo"))
    total, available = _kib(info.get("MemTotal")), _kib(info.get("MemAvailable"))
    limits = [limit for limit in memory_limits(root) if limit.limit < total]
    usable = min([available, *(limit.left for limit in limits)])
    return Memory(total, usable, min((limit.limit for limit in limits), default=None))


def gpu() -> str | None:
    """What an NVIDIA driver says of itself, or None without one."""
    text = _read(Path("/proc/driver/nvidia/version")).splitlines()
    return text[0].removeprefix("NVRM version:").strip() if text else None


def package(name: str) -> str | None:
    """The installed version of a package, None if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def revision() -> str | None:
    """The git revision of this source tree, with ``+`` if it has changes; None for an installed copy."""
    return revision_of(Path(__file__).resolve().parents[2])


def revision_of(tree: Path) -> str | None:
    """The same of another source tree."""
    if not (tree / ".git").exists():
        return None
    try:
        head = _git(tree, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(tree, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def facts() -> dict[str, object]:
    """Everything that a result needs beside it to be compared with another, JSON-ready."""
    c, m = cpu(), memory()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "cpu": c.model,
        "features": list(c.features),
        "cores": c.cores,
        "threads": c.threads,
        "quota": c.quota,
        "memory_bytes": m.total,
        "packages": {name: package(name) for name in ("bough", *PACKAGES)},
    }


def _git(folder: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kib(value: str | None) -> int:
    return int(value.split()[0]) * 1024 if value else 0
