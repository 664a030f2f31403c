"""The kernels under the address sanitizer: their tests, run on a library that checks every access."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path
import torch
from bough.device.ops import build, compact, library
compact.CHUNK = 0  # each form is an array of its own, so that what is read beyond it is seen
build.PACKAGED = Path("none.so")
# With -O3 and every check inlined the compiler takes half an hour.
build.COMMON_FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in build.COMMON_FLAGS)
torch.set_num_threads(2)
loading = library.load()
assert loading.library is not None, loading.reason
if not sys.argv[1:]:
    sys.exit(0)
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""

TESTS = (
    "device/test_packed.py",
    "device/test_compact.py",
    "device/test_ops.py",
    "device/test_attention.py",
    "device/test_quantise.py",
    "device/test_sampling.py",
    "device/test_experts.py",
    "device/test_lora.py",
    "models/test_stack.py",
)
Checked = Callable[..., None]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """Runs tests on a library that checks every access, which is built first."""
    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("needs g++ and its sanitizer")
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library, cache = runtime.stdout.strip(), tmp_path_factory.mktemp("cache")
    if not Path(library).is_file():
        pytest.skip("g++ has no address sanitizer here")
    here = Path(__file__).parent
    environment = os.environ | {
        "CXX": "g++ -fsanitize=address -fno-omit-frame-pointer --param asan-instrumentation-with-call-threshold=0",
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": library,
        # Python keeps what it allocates at start-up until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
    }

    def run(*arguments: str) -> None:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        done = subprocess.run(command, env=environment, cwd=here.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]

    run()
    assert list(cache.glob("bough/kernels-*.so")), "the checked library was built"
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS, ids=lambda name: Path(name).name)
def test_the_kernels_stay_within_their_arrays(checked: Checked, name: str) -> None:
    # Whatever runs on the reference ops: the word is at an end of a test's parameters, but may be in its name as well.
    checked("-k", "not [reference and not reference]", str(Path(__file__).parents[1] / name))
