"""The kernels under the address sanitizer: their tests, run on a library that checks every access."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from bough.device.ops.library import load
from tests.device.other_builds import PLAIN_TILES, TESTS, OtherBuild

# With -O3 and every check inlined the compiler takes half an hour.
CHANGE = 'build.COMMON_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)'
# Where the kernels for AMX can run in no other way.
CHANGE_TILES = f"{CHANGE} + ({PLAIN_TILES!r},)"

NAMES = (
    "device/test_packed.py",
    "device/test_compact.py",
    "device/test_ops.py",
    "device/test_attention.py",
    "device/test_quantise.py",
    "device/test_sampling.py",
    "device/test_experts.py",
    "device/test_lora.py",
    "models/test_stack.py",
    "worker/test_decode.py",
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> OtherBuild:
    """A library that checks every access."""
    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("needs g++ and its sanitizer")
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = runtime.stdout.strip()
    if not Path(library).is_file():
        pytest.skip("g++ has no address sanitizer here")
    environment = {
        "CXX": "g++ -fsanitize=address -fno-omit-frame-pointer --param asan-instrumentation-with-call-threshold=0",
        "LD_PRELOAD": library,
        # Python keeps what it allocates at start-up until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    found = load().library
    isas = [] if found is None else found.isas()
    change = CHANGE_TILES if "avx512bf16" in isas and "amx" not in isas else CHANGE
    return OtherBuild(tmp_path_factory.mktemp("cache"), change, environment)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=lambda name: Path(name).name)
def test_the_kernels_stay_within_their_arrays(checked: OtherBuild, name: str) -> None:
    # Whatever runs on the reference ops: the word is at an end of a test's parameters, but may be in its name as well.
    checked.run("-k", "not [reference and not reference]", str(TESTS / name))
