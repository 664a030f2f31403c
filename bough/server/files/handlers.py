"""/v1/files: upload, list, describe, download, delete."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
from fastapi import Request
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from bough.base.errors import InvalidRequest, Unavailable
from bough.base.folders import user_cache
from bough.base.limits import Limits
from bough.server.errors import BodyTimeout, TooLarge, UnsupportedMedia, encode_json
from bough.server.files.folder import DAY, FileObject, Folder
from bough.server.paging import page
from bough.server.service import Service

logger = logging.getLogger("bough.server")
T = TypeVar("T")

PURPOSES = ("batch", "user_data", "evals", "assistants")
MOST_LISTED = 10_000
FORM_FIELDS = 8
FORM_BYTES = 64 << 10
"""Everything of a form but the file."""
SHORTEST_LIFE, LONGEST_LIFE = 3600, 30 * 24 * 3600
"""Bounds of expires_after, in seconds."""


class Files:
    """The endpoints, over one folder. The folder is opened when the server starts to run."""

    def __init__(self, service: Service) -> None:
        self.service = service
        configured = service.config.serve.files
        root = Path(configured) if configured is not None else user_cache() / "files"
        self.folder = Folder(root, service.limits)
        self._thread = ThreadPoolExecutor(1, "bough-files")
        self._failure: Unavailable | None = Unavailable("the folder of uploaded files is being opened")

    async def open(self) -> bool:
        """Take the folder; whether that worked. Where it did not, every endpoint says why."""
        try:
            await self.on_disk(self.folder.open)
            await self.on_disk(self.folder.sweep)
        except Unavailable as error:
            logger.info("no files and batches: %s", error.message)
            self._failure = error
            return False
        self._failure = None
        return True

    def close(self) -> None:
        """Let go of the folder, behind everything that is being written."""
        self._failure = Unavailable("the server is shutting down")
        self._thread.submit(self.folder.close)
        self._thread.shutdown(wait=False)

    def ready(self) -> Folder:
        if self._failure is not None:
            raise self._failure
        return self.folder

    async def on_disk(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work``, which touches the disk, in the one thread that does."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def upload(self, request: Request) -> Response:
        """POST /v1/files: a form with a file and its purpose."""
        folder, limits, tenant = self.ready(), self.service.limits, _tenant(request)
        await self.on_disk(folder.sweep)
        async with _form(request, limits) as form:
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise InvalidRequest("the form needs a file", param="file")
            if purpose not in PURPOSES:
                raise InvalidRequest(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
            seconds = _life(form, limits, str(purpose))
            folder.check_room(tenant, upload.size or 0)
            file_id, path = await self.on_disk(folder.new_part, tenant)
            name = (upload.filename or "file")[:255]
            await self.on_disk(_copy, upload.file, path)
        return _json(await self.on_disk(folder.add, tenant, file_id, path, name, str(purpose), seconds))

    async def listing(self, request: Request) -> Response:
        """GET /v1/files."""
        purpose = request.query_params.get("purpose")
        found = [f for f in self.ready().owned(_tenant(request)) if purpose in (None, f.purpose)]
        entries = [msgspec.to_builtins(file) for file in found]
        return _json(page(request, entries, default=MOST_LISTED, most=MOST_LISTED))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/files/{id}."""
        return _json(self._named(request))

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content: the bytes, which no browser may take for a page."""
        file = self._named(request)
        headers = {"x-content-type-options": "nosniff"}
        return FileResponse(
            self.folder.data(_tenant(request), file.id), media_type="application/octet-stream", filename=file.filename,
            headers=headers,
        )  # fmt: skip

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/files/{id}."""
        file = self._named(request)
        await self.on_disk(self.folder.remove, _tenant(request), file.id)
        return _json({"id": file.id, "object": "file", "deleted": True})

    def _named(self, request: Request) -> FileObject:
        return self.ready().get(_tenant(request), request.path_params["file_id"])


def _tenant(request: Request) -> str:
    return str(request.scope["state"]["principal"].tenant)


def _json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")


@asynccontextmanager
async def _form(request: Request, limits: Limits) -> AsyncIterator[FormData]:
    """The form of a request, its file on disk where it is large. Raises what is wrong with it."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise UnsupportedMedia("a file is uploaded as multipart/form-data")
    bounded = Request(request.scope, _bounded(request.receive, limits))
    try:
        form = await bounded.form(max_files=1, max_fields=FORM_FIELDS, max_part_size=FORM_BYTES)
    except HTTPException as error:
        raise InvalidRequest(f"the form cannot be read: {error.detail}") from None
    try:
        yield form
    finally:
        await form.close()


def _bounded(receive: Receive, limits: Limits) -> Receive:
    """``receive`` that gives up on bodies that are too large or do not come."""
    received = 0

    async def next_piece() -> Message:
        nonlocal received
        try:
            async with asyncio.timeout(limits.read_seconds):
                message = await receive()
        except TimeoutError:
            raise BodyTimeout(f"nothing arrived for {limits.read_seconds:g} seconds") from None
        if message["type"] != "http.request":
            raise InvalidRequest("the client went away")
        received += len(message.get("body", b""))
        if received > limits.file_bytes + FORM_BYTES:
            raise TooLarge(f"a file may have {limits.file_bytes} bytes")
        return message

    return next_piece


def _life(form: FormData, limits: Limits, purpose: str) -> float | None:
    """Seconds that a file is kept; None is for good."""
    asked = form.get("expires_after[seconds]")
    if asked is None:
        return limits.files_days * DAY if purpose == "batch" else None
    text = str(asked)
    seconds = int(text[:16]) if text.isdecimal() and text.isascii() else -1
    check_life(seconds, "expires_after")
    return float(seconds)


def check_life(seconds: int, param: str) -> None:
    """Raises InvalidRequest for a time that is too short or too long to keep a file."""
    if not SHORTEST_LIFE <= seconds <= LONGEST_LIFE:
        raise InvalidRequest(f"{param}.seconds must be in [{SHORTEST_LIFE}, {LONGEST_LIFE}]", param=param)


def _copy(source: IO[bytes], path: Path) -> None:
    with open(path, "xb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
