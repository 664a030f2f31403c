"""Facts about the CPU, on this machine and on made-up ones."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from bough.device.platform import cuda
from bough.device.platform.cpu import CpuPlatform, default_threads, usable_processors


def machine(root: Path, files: dict[str, str]) -> CpuPlatform:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return CpuPlatform(threads=torch.get_num_threads(), root=root)


def test_this_machine() -> None:
    platform = CpuPlatform(threads=torch.get_num_threads())
    assert platform.device == torch.device("cpu")
    assert 1 << 20 < platform.free_memory() < 1 << 50


def test_threads_become_torchs() -> None:
    before = torch.get_num_threads()
    try:
        assert CpuPlatform(threads=1).threads == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


MEMINFO = "MemTotal: 8000 kB\nMemAvailable:    5000 kB\n"


def test_memory_without_a_limit(tmp_path: Path) -> None:
    assert machine(tmp_path, {"proc/meminfo": MEMINFO}).free_memory() == 5000 * 1024


@pytest.mark.parametrize(
    ("cgroup", "folder", "limit", "used"),
    [
        ("0::/a/b\n", "sys/fs/cgroup/a", "memory.max", "memory.current"),
        ("0::/a/b\n", "sys/fs/cgroup/a/b", "memory.max", "memory.current"),
        ("0::/\n", "sys/fs/cgroup", "memory.max", "memory.current"),
        ("4:memory:/x\n", "sys/fs/cgroup/memory/x", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ],
)
def test_memory_within_a_limit(tmp_path: Path, cgroup: str, folder: str, limit: str, used: str) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": cgroup,
        f"{folder}/{limit}": "3000000\n",
        f"{folder}/{used}": "1000000\n",
        f"{folder}/memory.stat": "anon 5\ninactive_file 4096\n",
    }
    assert machine(tmp_path, files).free_memory() == 2004096


def test_a_limit_of_max_is_none(tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert machine(tmp_path, files).free_memory() == 5000 * 1024


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/", {"cpu.max": "{} 100000"}),
        ("0::/system.slice/bough.service", {"system.slice/cpu.max": "{} 100000", "cpu.max": "max 100000"}),
        ("0::/docker/of/the/host", {"cpu.max": "{} 100000"}),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "{}", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}),
        ("4:cpuacct,cpu:/\xe9", {"cpu/cpu.cfs_quota_us": "{}", "cpu/cpu.cfs_period_us": "100000"}),
    ],
)
def test_a_quota_bounds_the_processors(tmp_path: Path, cgroup: str, files: dict[str, str]) -> None:
    def with_quota(quota: str) -> int:
        machine(tmp_path, {"proc/self/cgroup": f"5:memory:/b\n{cgroup}\n"})
        machine(tmp_path, {f"sys/fs/cgroup/{name}": text.format(quota) + "\n" for name, text in files.items()})
        return usable_processors(tmp_path)

    assert with_quota("100000") == 1
    assert with_quota("50000") == 1
    assert with_quota("max") == with_quota("-1") == usable_processors(tmp_path / "nothing") >= 1


def test_processors_of_one_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2})
    assert default_threads(tmp_path) == 3  # nothing says that any share a core
    block = "processor\t: {}\nphysical id\t: 0\ncore id\t\t: {}\n"
    machine(tmp_path, {"proc/cpuinfo": "\n".join(block.format(n, n // 2) for n in range(4))})
    assert default_threads(tmp_path) == 2 and usable_processors(tmp_path) == 3


def test_features_keep_to_the_known_ones(tmp_path: Path) -> None:
    platform = machine(tmp_path, {"proc/cpuinfo": "processor : 0\nflags\t\t: fpu avx2 fma sse amx_bf16\n"})
    assert platform.features() == ("avx2", "fma", "amx_bf16")


def test_what_triton_builds_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda *args: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "Python.h").touch()
    assert cuda.lacks_compiler()
    (tmp_path / "gcc").touch(0o755)
    assert not cuda.lacks_compiler()
    (tmp_path / "Python.h").unlink()
    assert cuda.lacks_compiler(), "without the headers"


@pytest.mark.parametrize(
    ("level", "flags", "limited"), [(28, "amx_tile", True), (29, "amx_tile", False), (28, "sse", False)]
)
def test_onednn_is_kept_from_tiles_that_are_not_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int, flags: str, limited: bool
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")  # what is set here goes with the test
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    processor = f"processor\t: 0\ncpuid level\t: {level}\nflags\t\t: fpu {flags}\n\n"
    machine(tmp_path, {"proc/cpuinfo": processor + processor.replace(str(level), "99")})
    assert ("ONEDNN_MAX_CPU_ISA" in os.environ) == limited
