"""The threads of a parallel region by themselves (csrc/team.h): what they share out, and who waits for whom."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bough.device.ops.build import SOURCES

Run = Callable[..., None]
PROGRAM = Path(__file__).parent / "native" / "team.cpp"


def compiled(folder: Path, *flags: str) -> Run:
    if platform.system() != "Linux" or shutil.which("g++") is None:
        pytest.skip("needs g++")
    program = folder / "team"
    command = ["g++", "-std=c++17", "-O1", "-pthread", *flags, f"-I{SOURCES}", str(PROGRAM), "-o", str(program)]
    subprocess.run(command, check=True)

    def run(*arguments: object) -> None:
        done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and done.stdout == "right\n", (done.stdout + done.stderr)[-4000:]

    return run


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return compiled(tmp_path_factory.mktemp("team"))


def test_nobody_waits_for_a_thread_that_holds_nothing(team: Run) -> None:
    team("late")


def test_who_is_on_a_core_with_another_leaves_it(team: Run) -> None:
    team("cores")


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_item_is_done_once_and_in_its_stage(team: Run, threads: int) -> None:
    for seed in range(5):
        team("stress", threads, 3000, seed)


@pytest.mark.slow
def test_nothing_races(tmp_path: Path) -> None:
    if not Path(subprocess.check_output(["g++", "-print-file-name=libtsan.so"], text=True).strip()).is_file():
        pytest.skip("g++ has no thread sanitizer here")
    run = compiled(tmp_path, "-fsanitize=thread", "-g")
    run("late")
    for seed in range(10):
        run("stress", 2 + seed % 4, 3000, seed)
