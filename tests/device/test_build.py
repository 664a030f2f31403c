"""The library builds without torch, is shared by processes, and its absence is explained and survived."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bough.base.errors import ConfigError
from bough.base.folders import user_cache
from bough.device.ops import build, library

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has not looked for the library yet, with an empty cache and nothing in the package."""
    monkeypatch.setattr(build, "PACKAGED", tmp_path / "none.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    return tmp_path / "bough"


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether the condition came true in time."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return met


def is_read(fifo: Path) -> bool:
    """Whether a process has it open for reading."""
    with contextlib.suppress(OSError):
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return True
    return False


@pytest.fixture(scope="module")
def loaded() -> library.Library:
    found = library.load().library
    if found is None:
        pytest.skip("no compiler here")
    return found


def test_the_build_module_needs_only_the_standard_library() -> None:
    """An installation imports it where no package is there yet."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import bough.device.ops.build"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, timeout=60)


def test_two_processes_build_one_library(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        compiler = build.find_compiler()
    except build.BuildError:
        pytest.skip("no compiler here")
    journal, wrapper = tmp_path / "journal", tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {journal}\nexec {" ".join(compiler)} "$@" -O0\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    # The digest is that of all of the variants; one of them is enough to see who builds.
    script = "from bough.device.ops import build as b; b.source_digest(); b.VARIANTS = {}; print(b.cached_library())"
    command = [sys.executable, "-c", script]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert paths == {str(path) for path in fresh.glob("kernels-*.so")} and len(paths) == 1
    assert sum(" -shared " in f" {line} " for line in journal.read_text().splitlines()) == 1
    assert not list(fresh.glob(".*")), "nothing half written is left"
    found = library.load().library
    assert found is not None and str(found.path) in paths
    assert found.digest() == build.source_digest()

    whole = found.path.read_bytes()
    monkeypatch.setattr(build, "compile_library", lambda target: target.write_bytes(whole))
    for damaged in (whole[: len(whole) // 2], b"", whole[:5000] + b"x" + whole[5001:]):
        found.path.unlink()  # not written over: this process has it open
        found.path.write_bytes(damaged)
        assert build.cached_library() == found.path and found.path.read_bytes() == whole
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.cached_library() == found.path
    found.path.unlink()
    found.path.write_bytes(whole[:5000])
    with pytest.raises(build.BuildError, match="no-such-compiler"):
        build.cached_library()


def test_a_compiler_that_takes_too_long_ends_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held, wrapper = tmp_path / "held", tmp_path / "compiler"
    os.mkfifo(held)
    wrapper.write_text(f"#!/bin/sh\n(cat < {held})\nexit 1\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.5)
    with pytest.raises(build.BuildError, match="took longer"):
        build.compile_library(tmp_path / "kernels.so")
    assert not is_read(held)


def test_a_compiler_that_hangs_is_not_tried_at_every_start(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrapper = tmp_path / "compiler"
    wrapper.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexec sleep 60\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.1)
    assert library.load().reason.endswith("took longer than 0.1 s")
    monkeypatch.setattr(build, "COMPILE_SECONDS", 900)
    again = library.load().reason
    assert "took longer than 0.1 s once" in again
    Path(again.split("remove ")[1].split(" to try")[0]).unlink()
    monkeypatch.setattr(build, "COMPILE_SECONDS", 0.2)
    assert library.load().reason.endswith("took longer than 0.2 s")


def test_a_killed_build_leaves_no_compiler_and_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held, started, wrapper, temporary = (tmp_path / name for name in ("held", "started", "compiler", "temporary"))
    os.mkfifo(held)
    temporary.mkdir()
    # The compiler and its child keep the fifo open, and the file that mktemp makes is the compiler's to remove.
    wrapper.write_text(f"#!/bin/sh\nexec 3<> {held}\nmktemp\n(touch {started}; sleep 60)\nexit 1\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("TMPDIR", str(temporary))
    script = f"""if 1:
        from pathlib import Path
        from bough.device.ops import build
        build.VARIANTS = {{}}
        build.compile_library(Path({str(tmp_path / "kernels.so")!r}))"""
    with subprocess.Popen([sys.executable, "-c", script]) as building:
        compiles = wait_for(lambda: started.exists() or building.poll() is not None)
        building.kill()
    assert compiles and building.returncode < 0, "it was killed while the compiler ran"
    assert wait_for(lambda: not is_read(held))
    assert wait_for(lambda: not any(temporary.iterdir()))


def test_who_waits_for_the_build_of_another_is_told(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_library(target: Path) -> None:
        target.write_bytes(b"kernels" + hashlib.sha256(b"kernels").digest())

    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "compile_library", compile_library)
    caplog.set_level(logging.INFO, logger=build.__name__)
    built = build.cached_library()
    assert "waiting" not in caplog.text
    built.unlink()
    with ThreadPoolExecutor() as pool, built.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(build.cached_library)
        assert wait_for(lambda: "waiting" in caplog.text)
    assert waiting.result() == built
    assert caplog.text.count("waiting") == 1


def test_without_a_compiler_torch_takes_over(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.WARNING, logger=library.__name__):
        found = library.load()
    assert found.library is None
    assert "no-such-compiler" in found.reason
    assert len(caplog.records) == 1


def test_a_compiler_that_fails_is_quoted(fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of paper >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(build.BuildError, match="out of paper"):
        build.cached_library()


@pytest.mark.parametrize("knows", ["false", '[ "$1" = --version ]'])
def test_of_a_compiler_that_fails_without_a_word_the_status_is_told(
    knows: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "c++"
    script.write_text(f"#!/bin/sh\n{knows} && exit 0\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(build.BuildError, match="ended with 3"):
        build.cached_library()


def knows_less(tmp_path: Path) -> tuple[Path, str]:
    """A compiler that writes files of one line and has no idea of the last variant, and that variant's name."""
    *_, name = build.variants()
    script = tmp_path / "c++"
    complaint = "".join(f"echo complaint {n} >&2\n" for n in range(9))
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *BOUGH_TABLE=kernels_{name}" "*) {complaint} exit 1;; esac\n'
        'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo >"$2"; shift; done\n'
    )
    script.chmod(0o755)
    return script, name


def test_a_variant_that_does_not_compile_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler, name = knows_less(tmp_path)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "VARIANTS", {platform.machine(): {"generic": (), name: ()}})
    assert build.compile_library(tmp_path / "kernels.so") == ["generic"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"no kernels for {name}," in caplog.text
    assert "complaint 0" in caplog.text and "complaint 8" not in caplog.text


def test_an_installation_tells_of_it_on_stderr(tmp_path: Path) -> None:
    compiler, name = knows_less(tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path],
        env={**os.environ, "CXX": str(compiler)}, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and build.is_whole(tmp_path / "bough/device/ops/kernels.so")
    assert "bough: kernels for generic" in done.stdout
    assert f"no kernels for {name}," in done.stderr and "complaint 0" in done.stderr


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_no_more_compilers_run_than_may(at_once: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["generic", *map(str, range(6))]
    monkeypatch.setattr(build, "VARIANTS", {platform.machine(): dict.fromkeys(names, ())})
    started: list[subprocess.Popen[str]] = []
    most = 0

    def start(command: list[str]) -> subprocess.Popen[str]:
        nonlocal most
        started.append(subprocess.Popen(["true"], stderr=subprocess.PIPE, text=True))
        # Those that have not been waited for may still run.
        most = max(most, sum(process.returncode is None for process in started))
        return started[-1]

    assert list(build._compile_variants(start, ["c++"], tmp_path, at_once)) == names
    assert most == min(at_once, len(names)) and len(started) == len(names)


@pytest.mark.parametrize(
    ("gib", "quota", "most"), [(0.5, "max", 1), (2.5, "max", 2), (64, "max", 4), (64, "300000", 3)]
)
def test_compilers_have_cores_and_memory(
    gib: float, quota: str, most: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("proc/self", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {int(gib * 2**20)} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
    assert build.compilers_at_once(tmp_path) == most
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(3 << 29))
    assert build.compilers_at_once(tmp_path) == 1, "a control group leaves less than the machine has"


@pytest.mark.parametrize("compiler", ["g++ 'x", "{tmp}/c++", "{tmp}/text"])
def test_no_compiler_however_odd_stops_a_start(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, script in {"c++": "#!/bin/sh\nprintf 'caf\\351' >&2\nexit 1\n", "text": "no program"}.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("CXX", compiler.format(tmp=tmp_path))
    assert library.load().library is None


def test_a_user_without_a_home_gets_plain_torch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 987654)
    found = library.load()
    assert found.library is None and "XDG_CACHE_HOME" in found.reason
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        user_cache()


def test_a_cache_that_cannot_be_written_is_named(fresh: Path) -> None:
    fresh.write_text("a file where the folder should be")
    with pytest.raises(build.BuildError, match=str(fresh)):
        build.cached_library()


def test_a_stale_packaged_library_is_not_used(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stale = fresh.parent / "broken.so"
    stale.write_bytes(b"not a library")
    monkeypatch.setattr(build, "PACKAGED", stale)
    monkeypatch.setattr(build, "cached_library", lambda: stale)
    found = library.load()
    assert found.library is None and str(stale) in found.reason


def test_kernels_below_what_the_processor_can_do_are_told_once(
    loaded: library.Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = functools.cache(library.load.__wrapped__)
    monkeypatch.setattr(library, "flags", lambda: frozenset({"no feature that kernels use"}))
    load()
    assert not caplog.records, "none are better"
    load.cache_clear()
    monkeypatch.setattr(library, "flags", lambda: frozenset({"amx_int8", "avx512f", "avx2", "asimddp"}))
    monkeypatch.setattr(library.Library, "isas", lambda self: ["generic"])
    assert load() is load()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"for {loaded.isa()}," in caplog.text and "does not know amx:" in caplog.text
    assert str(loaded.path) in caplog.text


def test_a_processor_that_no_kernels_are_for_does_without(
    loaded: library.Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library.Library, "isas", lambda self: [])
    found = library.load.__wrapped__()
    assert found.library is None and "SSSE3" in found.reason
    assert found.reason in caplog.text


def test_a_damaged_packaged_library_is_not_opened(loaded: library.Library, tmp_path: Path) -> None:
    """Half a library ends the process that opens it, so this is another one."""
    damaged, content = tmp_path / "kernels.so", loaded.path.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    script = f"""if 1:
        from pathlib import Path
        from bough.device.ops import build, library
        build.PACKAGED, build.cached_library = Path({str(damaged)!r}), lambda: Path({str(loaded.path)!r})
        print(library.load().reason)"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "built at first use")


@pytest.mark.usefixtures("loaded")
def test_there_is_one_openmp_runtime() -> None:
    """A second one would bring a second pool of threads. Asked of a fresh process: tests import other libraries."""
    code = (
        "from pathlib import Path; import torch; from bough.device.ops import library; import bough.engine.build\n"
        "torch.ones(1 << 20).sum(); print(library.load().openmp); print(Path('/proc/self/maps').read_text())"
    )
    openmp, *maps = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    paths = {line.split()[-1] for line in maps if "/lib" in line}
    assert {p for p in paths if Path(p).name.startswith(("libgomp", "libiomp", "libomp"))} == {openmp}


@pytest.mark.slow
def test_aarch64_has_two_variants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("no compiler for aarch64 here (Debian: g++-aarch64-linux-gnu)")
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    target = tmp_path / "kernels.so"
    assert build.compile_library(target) == ["generic", "dotprod"]
    assert int.from_bytes(target.read_bytes()[18:20], "little") == 183, "ELF's number of aarch64"
