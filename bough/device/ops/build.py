"""Compiles the CPU kernels into one shared library.

Used when the package is installed (the library lands in the package) and, if that library is missing or was built
from other sources, at the first use (it lands in the user's cache folder). Needs only the standard library: it runs
before torch is installed. The library knows no OpenMP: it receives the entry point of the runtime that torch has
loaded, see :mod:`bough.device.ops.library`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from bough.base.control_groups import free_memory, within_quota
from bough.base.processors import usable_cores

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PACKAGED = Path(__file__).parent / "kernels.so"

COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
                "-ffp-contract=off", "-fno-math-errno", "-w", "-Wno-psabi")  # fmt: skip
"""Without -Wno-psabi gcc notes, whatever -w says, how wide vectors are passed to functions, which are all inlined."""

AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512BF16 = (*AVX512, "-mavx512vnni", "-mavx512bf16")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "generic": ("-mssse3",),
        "avx2": AVX2,
        "avxvnni": (*AVX2, "-mavxvnni"),
        "avx512": AVX512,
        "avx512vnni": (*AVX512, "-mavx512vnni"),
        "avx512bf16": AVX512BF16,
        "amx": (*AVX512BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    },
    "aarch64": {"generic": (), "dotprod": ("-march=armv8.2-a+dotprod",)},
}
"""Machine -> instruction set -> flags; all of a machine go into one library, which chooses at run time. Of x86 all have
SSSE3, as NumPy's wheels have since 2.4."""

COMPILE_SECONDS = 900
VERSION_SECONDS = 60

COMPILER_BYTES = 1 << 30
"""Memory that is left to each compiler; the largest variants take 0.6 GB."""

COMPLAINT_LINES = 5
"""Of what a compiler says of a variant that it cannot compile: the cause comes first."""

Start = Callable[[list[str]], subprocess.Popen[str]]

# SIGTERM before the folder is removed: a compiler that still writes there would keep it from going.
GUARD = """trap '' TERM; read _; kill 0; rm -rf "$0"; kill -9 0"""

SEAL_BYTES = 32
"""A library ends with the SHA-256 of all before it, which loaders do not look at: half of one ends the process."""


class BuildError(Exception):
    """The library could not be built; the message says why, for the operator."""


class CompilerHangs(BuildError):
    """The compiler took longer than it is given."""


def variants() -> dict[str, tuple[str, ...]]:
    """Instruction set -> flags, for this machine."""
    return VARIANTS.get(platform.machine(), {"generic": ()})


@cache
def source_digest() -> str:
    """Hex digest of everything that decides what the library does."""
    digest = hashlib.sha256(repr((COMMON_FLAGS, VARIANTS)).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def find_compiler() -> list[str]:
    """The C++ compiler as a command: $CXX, else c++, g++ or clang++; BuildError if there is none."""
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"$CXX is no command: {error}") from error
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    raise BuildError(f"no C++ compiler: {chosen[0]} is not on the PATH" if chosen else "no C++ compiler on the PATH")


def compile_library(target: Path) -> list[str]:
    """Build the library into ``target``, atomically; returns the instruction sets that it holds.

    Raises BuildError without a compiler, or when the generic variant does not compile; CompilerHangs after
    ``COMPILE_SECONDS``. Another variant that does not compile is left out, with a warning.
    """
    compiler = find_compiler()
    try:
        with tempfile.TemporaryDirectory(prefix="bough-build-") as folder, _compilers(folder) as start:
            built = _compile_variants(start, compiler, Path(folder), compilers_at_once())
            defines = [f"-DBOUGH_WITH_{name.upper()}" for name in built]
            dispatch = Path(folder) / "dispatch.o"
            source = f'-DBOUGH_SOURCE="{source_digest()}"'
            command = [*compiler, *COMMON_FLAGS, *defines, source, "-c", str(SOURCES / "dispatch.cpp")]
            _finish(start([*command, "-o", str(dispatch)]))
            library = Path(folder) / "kernels.so"
            objects = [str(dispatch), *(str(o) for o in built.values())]
            _finish(start([*compiler, "-shared", *objects, "-lm", "-o", str(library)]))
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.{os.getpid()}")
            content = library.read_bytes()
            with beside.open("wb") as file:
                file.write(content + hashlib.sha256(content).digest())
                file.flush()
                os.fsync(file.fileno())
            beside.chmod(0o755)
            os.replace(beside, target)
    except subprocess.TimeoutExpired as error:
        raise CompilerHangs(f"the compiler took longer than {COMPILE_SECONDS} s") from error
    except OSError as error:
        raise BuildError(f"building the kernels failed: {error}") from error
    return list(built)


def is_whole(library: Path) -> bool:
    """Whether there is such a library that can be read, and nothing of it is missing or damaged."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-SEAL_BYTES]).digest() == content[-SEAL_BYTES:]


def cached_library(folder: Path | None = None) -> Path:
    """The library from the cache folder, built if it is not there; processes that ask at once build it once.

    Where there is no compiler any more, what another one has built of these sources will do. Raises BuildError if
    there is nothing, and it cannot be built or the folder cannot be written. A compiler that hangs is not tried again
    with the same sources: that would hold up every start.
    """
    folder = folder or cache_folder()
    name = "kernels-" + hashlib.sha256(f"{source_digest()} {platform.machine()}".encode()).hexdigest()[:24]
    try:
        try:
            target = folder / f"{name}-{_compiler_digest()}.so"
        except BuildError:
            for found in folder.glob(f"{name}-*.so"):
                if is_whole(found):
                    return found
            raise
        if is_whole(target):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not is_whole(target):
                _compile_once(target)
    except OSError as error:
        raise BuildError(f"the cache folder {folder} is not usable: {error}") from error
    return target


def _compile_once(target: Path) -> None:
    hangs = target.with_suffix(".hangs")
    if hangs.exists():
        raise CompilerHangs(f"{hangs.read_text()} once; remove {hangs} to try it again")
    # Whatever waits for it says nothing meanwhile, so that this must be seen without any settings.
    log.warning("compiling the kernels for this processor, once; this takes a few minutes")
    try:
        compile_library(target)
    except CompilerHangs as error:
        hangs.write_text(str(error))
        raise


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/bough, or ~/.cache/bough. Raises BuildError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "bough"
    except RuntimeError as error:
        raise BuildError("there is no home folder to cache kernels in: set XDG_CACHE_HOME") from error


def _compiler_digest() -> str:
    """Another compiler may know more instruction sets."""
    command = [*find_compiler(), "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=VERSION_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took longer than {VERSION_SECONDS} s to tell its version") from error
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{command[0]} failed: {_complaint(done.stderr, done.returncode)[-500:]}")
    return hashlib.sha256(done.stdout.encode()).hexdigest()[:8]


@contextlib.contextmanager
def _compilers(folder: str) -> Iterator[Start]:
    """Starts compilers that do not outlive the block, nor this process: not even one that SIGKILL ends.

    They are in the process group of a guard, a shell that reads from a pipe whose other end only this process holds.
    At its end of file the guard removes ``folder`` and kills its group.
    """
    guard = subprocess.Popen(["sh", "-c", GUARD, folder], stdin=subprocess.PIPE, process_group=0)
    started: list[subprocess.Popen[str]] = []

    def start(command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", env={**os.environ, "TMPDIR": folder}, process_group=guard.pid,
        )  # fmt: skip
        started.append(process)
        return process

    try:
        yield start
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()
        for process in started:
            process.communicate()


def compilers_at_once(root: Path = Path("/")) -> int:
    """Compilers that there are cores and memory for, at least one. ``root`` is where /proc and /sys hang."""
    return max(1, min(within_quota(usable_cores(root), root), free_memory(root) // COMPILER_BYTES))


def _compile_variants(start: Start, compiler: list[str], folder: Path, at_once: int) -> dict[str, Path]:
    """Object file of each variant that compiles, ``at_once`` compiled side by side; what fails is told in a warning."""
    waiting = deque(reversed(variants().items()))  # those that take longest come last there
    running: deque[tuple[str, subprocess.Popen[str], Path]] = deque()
    built = {}
    while waiting or running:
        if waiting and len(running) < at_once:
            name, flags = waiting.popleft()
            target = folder / f"{name}.o"
            command = [*compiler, *COMMON_FLAGS, *flags, f"-DBOUGH_TABLE=kernels_{name}"]
            command += ["-c", str(SOURCES / "kernels.cpp"), "-o", str(target)]
            running.append((name, start(command), target))
            continue
        name, process, target = running.popleft()
        _, errors = process.communicate(timeout=COMPILE_SECONDS)
        if process.returncode == 0:
            built[name] = target
            continue
        complaint = _complaint(errors, process.returncode)
        if name == "generic":
            raise BuildError(f"{compiler[0]} cannot compile the kernels: {complaint[-500:]}")
        first = "\n".join(complaint.splitlines()[:COMPLAINT_LINES])
        log.warning("no kernels for %s, %s cannot compile them: %s", name, compiler[0], first)
    return {name: built[name] for name in variants() if name in built}


def _finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=COMPILE_SECONDS)
    if process.returncode != 0:
        raise BuildError(f"the compiler failed: {_complaint(errors, process.returncode)[-500:]}")


def _complaint(said: str, status: int) -> str:
    """What a compiler said, or how it ended where it said nothing."""
    return said.strip() or f"it ended with {status}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process that compiles the kernels")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
