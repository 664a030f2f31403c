"""Every kernel compiles for the GPUs that are meant, within their limits, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bough.device.ops.triton import attention

SHARED = {80: 99 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that one program may have (CUDA programming guide, compute capabilities): what is made for
8.0, which has more, has to run on 8.6 and 8.9, too."""

SPILLED = 8
"""Bytes per thread: the assembler gives up two registers where one more program then fits a multiprocessor."""


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """All of the builds that are asked for, checked for what holds of each."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.device.triton.ahead", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    builds = [json.loads(line) for line in run.stdout.splitlines()]
    for build in builds:
        assert "error" not in build, build
        assert build["shared"] <= SHARED[build["architecture"]], build
        assert build["stack"] <= SPILLED, f"registers are spilled: {build}"
        assert not build["expects"] or build[build["expects"]] > 0, build
        assert not build["narrow"], f"an index may overflow: {build}"
    return builds


def test_kernels_compile_ahead_of_time(tmp_path: Path) -> None:
    builds = compiled(tmp_path)
    sources = Path(attention.__file__).parent.glob("*.py")
    kernels = {name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.M)}
    assert {build["kernel"] for build in builds} == kernels


@pytest.mark.slow
def test_kernels_compile_in_every_form(tmp_path: Path) -> None:
    assert len(compiled(tmp_path, "--every")) > 700
