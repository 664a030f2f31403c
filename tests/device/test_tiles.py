"""The kernels for AMX on processors without it: their tests, run on a library whose tiles are plain C++."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from bough.device.ops.library import load
from tests.device.other_builds import PLAIN_TILES, TESTS, OtherBuild

CHANGE = f"""
for name in [*build.variants()]:
    if name not in ("generic", "amx"):
        del build.variants()[name]
build.COMMON_FLAGS = (*build.COMMON_FLAGS, {PLAIN_TILES!r})
"""

NAMES = (
    "device/test_packed.py",
    "device/test_attention.py",
    "device/test_experts.py",
    "device/test_lora.py",
    "models/test_stack.py",
)


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> OtherBuild:
    """The library for AMX with other tiles."""
    library = load().library
    if platform.machine() != "x86_64" or library is None or "avx512bf16" not in library.isas():
        pytest.skip("the rest of these kernels needs AVX-512 BF16")
    return OtherBuild(tmp_path_factory.mktemp("cache"), CHANGE, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=lambda name: Path(name).name)
def test_kernels_for_amx(tiled: OtherBuild, name: str) -> None:
    shown = tiled.run("-k", "amx", str(TESTS / name))
    assert " passed" in shown and "skipped" not in shown
