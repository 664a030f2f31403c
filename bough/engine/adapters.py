"""How adapters get from a folder to the device while it computes."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bough.base.errors import ConfigError, InvalidRequest, NotFound
from bough.device.lora.pool import LowRank
from bough.engine.executor import WorkerExecutor
from bough.weights.adapter import CONFIG, WEIGHTS, read_adapter
from bough.worker.worker import Worker

DIGEST_CHARS = 16


class AdapterLoader:
    """:class:`bough.base.plan.AdapterDevice` of a local worker, for the adapters in one folder.

    A thread of its own reads files; putting the updates into their places is a moment's work between two steps.
    """

    def __init__(self, executor: WorkerExecutor, folder: Path, places: int) -> None:
        self.places = places
        self._executor, self._folder = executor, folder.resolve()
        self._thread = ThreadPoolExecutor(1, "adapters")

    def load(self, place: int, name: str, path: str) -> Future[str]:
        """See :class:`bough.base.plan.AdapterDevice`; the result is a digest of the adapter's files."""
        done: Future[str] = Future()

        def read() -> None:
            try:
                folder = self._inside(name, path)
                modules, version = read_adapter(folder), _digest(folder)
                self._install(place, modules)
                done.set_result(version)
            except ConfigError as error:
                done.set_exception(InvalidRequest(error.message, param="lora_path"))
            except BaseException as error:
                done.set_exception(error)

        self._thread.submit(read)
        return done

    def clear(self, place: int) -> None:
        def clear(worker: Worker) -> None:
            assert worker.adapters is not None
            worker.adapters.clear(place)

        self._executor.call(clear)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _install(self, place: int, modules: dict[str, LowRank]) -> None:
        def install(worker: Worker) -> None:
            assert worker.adapters is not None
            worker.adapters.install(place, modules)

        self._executor.call(install).result()

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
