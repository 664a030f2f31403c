"""The kernels for AMX on processors without it: their tests, run on a library whose tiles are plain C++.

Where there is no AVX-512 either, its vectors are plain C++, too, and what is built so goes by the name of AVX2.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from bough.device.ops.library import load
from tests.device.other_builds import PLAIN_TILES, PLAIN_VECTORS, TESTS, OtherBuild

CHANGE = """
for name in [*build.variants()]:
    if name not in ("generic", {isa!r}):
        del build.variants()[name]
build.variants()[{isa!r}] += {flags!r}
build.COMMON_FLAGS += ({tiles!r},)
"""
# Compilers take long for vectors that the processor has not.
FLAGS = {"amx": (), "avx2": (*PLAIN_VECTORS, "-D__AMX_TILE__", "-D__AMX_BF16__", "-D__AMX_INT8__", "-O1")}

NAMES = (
    "device/test_packed.py",
    "device/test_attention.py",
    "device/test_experts.py",
    "device/test_lora.py",
    "models/test_stack.py",
)


@pytest.fixture(scope="module")
def isa() -> str:
    """Whose kernels are replaced."""
    library = load().library
    isas = [] if platform.machine() != "x86_64" or library is None else library.isas()
    if "avx2" not in isas:
        pytest.skip("the rest of these kernels needs AVX2")
    return "amx" if "avx512bf16" in isas else "avx2"


@pytest.fixture(scope="module")
def tiled(isa: str, tmp_path_factory: pytest.TempPathFactory) -> OtherBuild:
    """The library for AMX with other tiles."""
    return OtherBuild(tmp_path_factory.mktemp("cache"), CHANGE.format(isa=isa, flags=FLAGS[isa], tiles=PLAIN_TILES), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=lambda name: Path(name).name)
def test_kernels_for_amx(tiled: OtherBuild, isa: str, name: str) -> None:
    shown = tiled.run("-k", isa, str(TESTS / name))
    # AVX2 does not multiply all forms.
    assert " passed" in shown and (isa == "avx2" or "skipped" not in shown)
