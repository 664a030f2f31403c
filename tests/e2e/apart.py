"""Environments of their own for clients whose requirements exclude ours."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


def environment(folder: Path, *requirements: str) -> Path:
    """A Python that has ``requirements`` in the versions that they ask for, and besides them what this one has.

    Skips the test where they cannot be installed, as on a machine without a network.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    [site] = (folder / "lib").glob("python*/site-packages")
    (site / "ours.pth").write_text(sysconfig.get_path("purelib"))
    # Whatever they ask for, the largest package is not fetched again.
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={importlib.metadata.version('torch')}\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check", "install",
         "-c", str(constraints), *requirements],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{', '.join(requirements)} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return python
