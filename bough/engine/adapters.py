"""How adapters get from a folder to the device while it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bough.base.errors import ConfigError, InvalidRequest, NotFound
from bough.device.lora.updates import Updates
from bough.engine.executor import WorkerExecutor
from bough.weights.adapter import CONFIG, WEIGHTS, read_adapter
from bough.worker.worker import Worker

DIGEST_CHARS = 16


Read = tuple[Updates, str]
"""An adapter and its version."""


class Loading:
    """:class:`bough.base.plan.AdapterLoad`: what was read is installed by the thread that asks whether it is done."""

    def __init__(self, read: Future[Read], install: Callable[[Updates], Future[None]]) -> None:
        self._read, self._install = read, install
        self._installed: Future[None] | None = None

    def done(self) -> bool:
        if self._installed is None:
            if not self._read.done():
                return False
            if self._read.exception() is not None:
                return True
            self._installed = self._install(self._read.result()[0])
        return self._installed.done()

    def result(self) -> str:
        """The version; raises NotFound, or InvalidRequest for an adapter that does not fit the model."""
        try:
            _, version = self._read.result()
            assert self._installed is not None
            self._installed.result()
        except ConfigError as error:
            raise InvalidRequest(error.message, param="lora_path") from error
        return version


class AdapterLoader:
    """:class:`bough.base.plan.AdapterDevice` of a local worker, for the adapters in one folder.

    A thread of its own reads files; putting the updates into their places is a moment's work between two steps, asked
    for by the thread that launches the steps.
    """

    def __init__(self, executor: WorkerExecutor, folder: Path, places: int) -> None:
        self.places = places
        self._executor, self._folder = executor, folder.resolve()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def load(self, place: int, name: str, path: str) -> Loading:
        """See :class:`bough.base.plan.AdapterDevice`; the result is a digest of the adapter's files."""

        def read() -> Read:
            folder = self._inside(name, path)
            version = _digest(folder)
            modules = read_adapter(folder)
            if _digest(folder) != version:
                raise InvalidRequest(f"adapter {name!r} changed while it was read; load it again", param="lora_path")
            return modules, version

        return Loading(self._thread.submit(read), partial(self._install, place))

    def clear(self, place: int) -> None:
        def clear(worker: Worker) -> None:
            assert worker.adapters is not None
            worker.adapters.clear(place)

        self._executor.call(clear)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _install(self, place: int, updates: Updates) -> Future[None]:
        def install(worker: Worker) -> None:
            assert worker.adapters is not None
            worker.adapters.install(place, updates)

        return self._executor.call(install)

    def _inside(self, name: str, path: str) -> Path:
        """The folder meant, which lies in ours whatever ``path`` says. NotFound where there is no adapter."""
        try:
            folder = (self._folder / path).resolve()
            found = folder.is_relative_to(self._folder) and folder != self._folder and (folder / CONFIG).is_file()
        except (OSError, ValueError, RuntimeError):
            found = False
        if not found:
            raise NotFound(f"there is no adapter {name!r}", param="model", code="model_not_found")
        return folder


def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        with (folder / name).open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:DIGEST_CHARS]
