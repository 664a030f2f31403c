"""Tests of kernels that are built otherwise than for use, run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]

NATIVE = Path(__file__).parent / "native"
PLAIN_TILES = f'-DBOUGH_TILES="{NATIVE / "tiles.h"}"'
"""The flag for tiles of AMX in plain C++, for processors that have none."""
PLAIN_VECTORS = ("-include", str(NATIVE / "vectors.h"))
"""Flags for AVX-512 in plain C++, beside those for AVX2."""

SCRIPT = """
import sys
from pathlib import Path
import torch
from bough.device.ops import build, compact, library
compact.CHUNK = 0  # each form is an array of its own, so that what is read beyond it is seen
build.PACKAGED = Path("none.so")
{change}
torch.set_num_threads(2)
loading = library.load()
assert loading.library is not None, loading.reason
if not sys.argv[1:]:
    sys.exit(0)
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


class OtherBuild:
    """A library in the cache folder ``cache``, built at once.

    Args:
        cache: an empty folder.
        change: Python that changes ``bough.device.ops.build``.
        environment: variables that are set for the build and the tests.
    """

    def __init__(self, cache: Path, change: str, environment: Mapping[str, str]) -> None:
        self._script = SCRIPT.format(change=change)
        self._environment = os.environ | environment | {"XDG_CACHE_HOME": str(cache)}
        self.run()
        assert list(cache.glob("bough/kernels-*.so")), "the library was built"

    def run(self, *arguments: str) -> str:
        """Run pytest with ``arguments``, from the root of the tree; what it writes. Fails as it does."""
        done = subprocess.run(
            [sys.executable, "-c", self._script, *arguments],
            env=self._environment, cwd=TESTS.parent, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout
