"""The kernels under the address sanitizer: their own tests, run on a library that checks every access."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bough.device.ops import build

SCRIPT = """
import sys
from pathlib import Path
import torch
from bough.device.ops import build, library
build.PACKAGED = Path("none.so")
torch.set_num_threads(2)
loading = library.load()
assert loading.library is not None, loading.reason
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""

TESTS = (
    "test_packed.py",
    "test_ops.py",
    "test_attention.py",
    "test_quantise.py",
    "test_sampling.py",
    "test_experts.py",
    "test_lora.py",
)


@pytest.mark.slow
def test_the_kernels_stay_within_their_arrays(tmp_path: Path) -> None:
    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("needs g++ and its sanitizer")
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = runtime.stdout.strip()
    if not Path(library).is_file():
        pytest.skip("g++ has no address sanitizer here")
    here = Path(__file__).parent
    environment = os.environ | {
        "CXX": "g++ -fsanitize=address -fno-omit-frame-pointer",
        "XDG_CACHE_HOME": str(tmp_path),
        "LD_PRELOAD": library,
        # Python keeps what it allocates at start-up until the end.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    tests = [str(here / name) for name in TESTS]
    command = [sys.executable, "-c", SCRIPT, "-k", "not reference", *tests]
    run = subprocess.run(command, env=environment, cwd=here.parents[1], capture_output=True, text=True, timeout=1500)
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert build.source_digest() and list(tmp_path.glob("bough/kernels-*.so")), "the checked library was built"
