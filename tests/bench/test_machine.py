"""Facts of machines that exist only as files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bough.bench import machine

CPUINFO = """processor\t: 0
model name\t: Toy CPU 3000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 fma avx512f

processor\t: 1
model name\t: Toy CPU 3000
physical id\t: 0
core id\t\t: 0
flags\t\t: fpu avx2 fma avx512f
"""


OWN_GROUP = {"proc/self/cgroup": "4:memory:/\n0::/\n"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_two_threads_of_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    root = write(tmp_path, {"proc/cpuinfo": CPUINFO, **OWN_GROUP, "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    cpu = machine.cpu(root)
    assert cpu == machine.Cpu("Toy CPU 3000", ("avx2", "fma", "avx512f"), 1, 2, 1.5)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    cpu = machine.cpu(tmp_path)
    assert cpu.features == () and cpu.quota is None and cpu.threads == len(os.sched_getaffinity(0))
    assert machine.memory(tmp_path) == machine.Memory(0, 0, None)


MEMINFO = "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n"


@pytest.mark.parametrize(
    ("files", "limit", "usable"),
    [
        ({}, None, 4 << 30),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "1\n"}, None, 4 << 30),
        (
            {"sys/fs/cgroup/memory.max": f"{3 << 30}\n", "sys/fs/cgroup/memory.current": f"{1 << 30}\n"},
            3 << 30,
            2 << 30,
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 << 30}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 << 30}\n",
            },
            2 << 30,
            1 << 30,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None, 4 << 30),
    ],
)
def test_memory_minds_the_control_group(tmp_path: Path, files: dict[str, str], limit: int | None, usable: int) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO, **OWN_GROUP, **files})
    memory = machine.memory(root)
    assert memory.limit == limit and memory.usable == usable


def test_every_group_bounds_the_memory(tmp_path: Path) -> None:
    """The parent leaves less, but has a limit that says nothing; broken lines are passed over."""
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "nothing\n0::/a\n",
        "sys/fs/cgroup/a/memory.max": f"{3 << 30}\n",
        "sys/fs/cgroup/a/memory.current": f"{1 << 30}\n",
        "sys/fs/cgroup/a/memory.stat": "broken\nanon 1 2\ninactive_file x\n",
        "sys/fs/cgroup/memory.max": f"{10 << 30}\n",
        "sys/fs/cgroup/memory.current": f"{9 << 30}\n",
    }
    assert machine.memory(write(tmp_path, files)) == machine.Memory(8 << 30, 2 << 30, 3 << 30)


def test_facts_can_be_written() -> None:
    facts = json.loads(json.dumps(machine.facts()))
    assert facts["packages"]["numpy"] and facts["threads"] >= 1
