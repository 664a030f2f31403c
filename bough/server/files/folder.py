"""Files in a folder: bounded in number and bytes, named by the server only, one server at a time.

Each tenant has a folder of its own, each file two names in it: ``ID.data`` and ``ID.json``, which describes it and
is written last, so that a file without it was never complete.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from bough.base.errors import InvalidRequest, NotFound, Unavailable
from bough.base.limits import Limits
from bough.server.errors import TooLarge

S = TypeVar("S", bound=msgspec.Struct)

DAY = 24 * 3600.0
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


class FileObject(msgspec.Struct, kw_only=True):
    """A file as OpenAI's clients know it; times in seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"
    status_details: None = None
    expires_at: int | None = None


class Folder:
    """All tenants' files. Methods that touch the disk are marked so; all calls of those come from one thread."""

    def __init__(self, root: Path, limits: Limits, now: Callable[[], float] = time.time) -> None:
        self.root = root
        self.files: dict[str, dict[str, FileObject]] = {}
        self._limits = limits
        self._now = now
        self._lock = -1

    def open(self) -> None:
        """Disk: make the folder, take it for this process, and learn what is in it. Raises Unavailable."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise Unavailable(
                "another server uses the folder of uploaded files; give this one its own with --files", retry_after=60.0
            ) from None
        except OSError as error:
            self.close()
            raise Unavailable(
                f"the folder of uploaded files cannot be used: {error.strerror}", retry_after=60.0
            ) from None
        for folder in sorted(self.root.glob("t-*")):
            for leftover in folder.glob("*.part"):
                leftover.unlink()
            found = self.load(folder.name[2:], "file-", FileObject)
            self.files[folder.name[2:]] = {file.id: file for file in found}

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # Records: small structs beside the data

    def load(self, tenant: str, prefix: str, kind: type[S]) -> list[S]:
        """Disk: all records of a tenant whose names begin with ``prefix``, oldest first; broken ones are left out."""
        found = []
        for path in sorted(self._folder(tenant).glob(f"{prefix}*.json"), key=lambda p: p.stat().st_mtime_ns):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except (msgspec.MsgspecError, OSError):
                continue
        return found

    def save(self, tenant: str, name: str, record: msgspec.Struct) -> None:
        """Disk: write ``record`` whole or not at all."""
        path = self._path(tenant, name, "json")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        part = path.with_suffix(".part")
        with open(part, "wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    # Files

    def check_room(self, tenant: str, size: int) -> None:
        """Raises InvalidRequest or TooLarge when a tenant's share would not hold another file of ``size`` bytes."""
        owned = self.owned(tenant)
        if len(owned) >= self._limits.files:
            raise InvalidRequest(f"there are {len(owned)} files already; delete some", code="too_many_files")
        held = sum(file.bytes for file in owned)
        if held + size > self._limits.files_bytes:
            raise TooLarge(f"files may have {self._limits.files_bytes} bytes in all, and {held} are taken")

    def new_id(self) -> str:
        return f"file-{secrets.token_hex(16)}"

    def new_part(self, tenant: str) -> tuple[str, Path]:
        """Disk: (id, path) of a file that is yet to be written and then added."""
        file_id = self.new_id()
        path = self._path(tenant, file_id, "part")
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return file_id, path

    def add(
        self, tenant: str, file_id: str, path: Path, filename: str, purpose: str, seconds: float | None
    ) -> FileObject:
        """Disk: take over ``path``, which is complete, for ``seconds`` or for good."""
        size, now = path.stat().st_size, int(self._now())
        expires = None if seconds is None else now + int(seconds)
        file = FileObject(
            id=file_id, bytes=size, created_at=now, filename=filename, purpose=purpose, expires_at=expires
        )
        path.replace(self._path(tenant, file_id, "data"))
        self.save(tenant, file_id, file)
        self.files.setdefault(tenant, {})[file_id] = file
        return file

    def get(self, tenant: str, file_id: str) -> FileObject:
        """Raises NotFound for what is not there, has expired, or is another tenant's."""
        file = self.files.get(tenant, {}).get(file_id)
        if file is None or self._expired(file):
            raise NotFound(f"No such File object: {file_id[:256]}", param="id")
        return file

    def owned(self, tenant: str) -> list[FileObject]:
        """A tenant's files, oldest first."""
        return [file for file in list(self.files.get(tenant, {}).values()) if not self._expired(file)]

    def data(self, tenant: str, file_id: str) -> Path:
        """Where the bytes of a file are."""
        return self._path(tenant, file_id, "data")

    def remove(self, tenant: str, file_id: str) -> None:
        """Disk: forget a file and free its bytes."""
        self.files.get(tenant, {}).pop(file_id, None)
        for suffix in ("json", "data"):
            self._path(tenant, file_id, suffix).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Disk: remove what has expired."""
        for tenant, files in list(self.files.items()):
            for file in list(files.values()):
                if self._expired(file):
                    self.remove(tenant, file.id)

    def forget(self, tenant: str, name: str) -> None:
        """Disk: remove a record."""
        self._path(tenant, name, "json").unlink(missing_ok=True)

    def beside(self, tenant: str, name: str, what: str) -> Path:
        """A path for work in progress that belongs to the record ``name``; ``what`` is the server's own word."""
        return self._path(tenant, name, what)

    def _expired(self, file: FileObject) -> bool:
        return file.expires_at is not None and file.expires_at <= self._now()

    def _folder(self, tenant: str) -> Path:
        return self.root / f"t-{tenant}"

    def _path(self, tenant: str, name: str, suffix: str) -> Path:
        # Names are the server's own; one that a client made up never becomes a path.
        if not _ID.fullmatch(name):
            raise NotFound(f"No such File object: {name[:256]}", param="id")
        return self._folder(tenant) / f"{name}.{suffix}"
