"""/v1/batches: requests from a file, answered into a file, behind everything that somebody waits for.

What is answered is on disk at once, so a batch goes on where it was when the server starts again.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bough.base.errors import BoughError, EngineError, InvalidRequest, NotFound, Overloaded, Unavailable
from bough.server.auth import Principal
from bough.server.body import decode_body
from bough.server.errors import encode_json, error_fields
from bough.server.files.batch import (
    OVER,
    Batch,
    BatchError,
    BatchErrors,
    BatchRequest,
    Place,
    answered,
    append,
    read_line,
    read_places,
)
from bough.server.files.folder import DAY
from bough.server.files.handlers import Files, check_life
from bough.server.options import check_metadata
from bough.server.paging import page
from bough.server.programs import programs_named
from bough.server.service import Service
from bough.server.work import Call, Operation

logger = logging.getLogger("bough.server")

WINDOW = "24h"
LISTED, MOST_LISTED = 20, 100
RESULTS = (("output_file_id", "output"), ("error_file_id", "errors"))
"""(field of the batch, file of work in progress)."""


class Batches:
    """The endpoints and what runs behind them. ``operations`` are the endpoints that a batch may name."""

    def __init__(self, service: Service, files: Files, operations: Mapping[str, Operation[Any]]) -> None:
        self.service = service
        self.files = files
        self.operations = operations
        self._batches: dict[str, dict[str, Batch]] = {}
        self._room = asyncio.Semaphore(service.limits.batch_running)
        service.on_start.append(lambda: service.spawn(self._live()))

    async def create(self, call: Call, body: BatchRequest) -> bytes:
        """POST /v1/batches."""
        folder, tenant, limits = self.files.ready(), call.principal.tenant, call.service.limits
        if body.endpoint not in self.operations:
            raise InvalidRequest(f"endpoint must be one of {', '.join(self.operations)}", param="endpoint")
        if body.completion_window != WINDOW:
            raise InvalidRequest(f"completion_window must be {WINDOW}", param="completion_window")
        check_metadata(body.metadata, limits)
        if body.output_expires_after is not None:
            check_life(body.output_expires_after.seconds, "output_expires_after")
        try:
            source = folder.get(tenant, body.input_file_id)
        except NotFound:
            raise InvalidRequest(f"there is no file {body.input_file_id[:256]!r}", param="input_file_id") from None
        if source.purpose != "batch":
            raise InvalidRequest("the file's purpose is not batch", param="input_file_id")
        owned = self._batches.setdefault(tenant, {})
        if sum(batch.status not in OVER for batch in owned.values()) >= limits.batches:
            raise Overloaded(f"{limits.batches} batches are not finished yet")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{secrets.token_hex(16)}", endpoint=body.endpoint, input_file_id=source.id,
            completion_window=WINDOW, created_at=now, expires_at=now + int(DAY), metadata=body.metadata,
            model=call.service.model_name, output_expires_after=body.output_expires_after,
        )  # fmt: skip
        owned[batch.id] = batch
        try:
            await self._save(tenant, batch)
        except BaseException:  # it never runs, so it must not count
            del owned[batch.id]
            raise
        self.service.spawn(self._run(tenant, batch))
        over = [each.id for each in owned.values() if each.status in OVER]
        for forgotten in over[: max(0, len(over) - limits.batches_over)]:
            owned.pop(forgotten, None)
            await self.files.on_disk(folder.forget, tenant, forgotten)
        return encode_json(batch)

    async def listing(self, request: Request) -> Response:
        """GET /v1/batches, the latest first."""
        self.files.ready()
        owned = self._batches.get(_tenant(request), {})
        entries = [msgspec.to_builtins(batch) for batch in owned.values()]
        return _json(page(request, entries, default=LISTED, most=MOST_LISTED))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/batches/{id}."""
        return _json(self._named(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel: what runs is answered still, nothing more is begun."""
        batch = self._named(request)
        if batch.status in OVER:
            raise InvalidRequest(f"Cannot cancel a batch with status '{batch.status}'.")
        if batch.cancelling_at is None:
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            await self._save(_tenant(request), batch)
        return _json(batch)

    def _named(self, request: Request) -> Batch:
        self.files.ready()
        name = request.path_params["batch_id"]
        batch = self._batches.get(_tenant(request), {}).get(name)
        if batch is None:
            raise NotFound(f"No batch found with id '{name[:256]}'.")
        return batch

    async def _save(self, tenant: str, batch: Batch) -> None:
        await self.files.on_disk(self.files.folder.save, tenant, batch.id, msgspec.structs.replace(batch))

    # The work

    async def _live(self) -> None:
        """Hold the folder until the server drains, and go on with what is not finished in it."""
        if not await self.files.open():
            return
        try:
            await self._resume()
            await asyncio.Event().wait()
        finally:
            self.files.close()

    async def _resume(self) -> None:
        folder, oldest = self.files.folder, time.time() - self.service.limits.files_days * DAY
        for tenant in list(folder.files):
            found = await self.files.on_disk(folder.load, tenant, "batch_", Batch)
            for batch in sorted(found, key=lambda batch: batch.created_at):
                if batch.status in OVER and batch.created_at < oldest:
                    await self.files.on_disk(folder.forget, tenant, batch.id)
                    continue
                self._batches.setdefault(tenant, {})[batch.id] = batch
                if batch.status not in OVER:
                    self.service.spawn(self._run(tenant, batch))

    async def _run(self, tenant: str, batch: Batch) -> None:
        try:
            if batch.status != "finalizing":
                waiting = await self._begin(tenant, batch)
                if waiting is None:
                    return
                await self._answer_all(tenant, batch, waiting)
            await self._finish(tenant, batch)
        except* OSError as errors:
            logger.error("batch %s stops: %s", batch.id, errors.exceptions[0])
            await self._fail(tenant, batch, [BatchError(code="file_error", message="a file of the batch was lost")])

    async def _begin(self, tenant: str, batch: Batch) -> list[Place] | None:
        """The requests that are not answered yet; None where the input is wrong."""
        folder, on_disk = self.files.folder, self.files.on_disk
        source = folder.data(tenant, batch.input_file_id)
        try:
            places, errors = await on_disk(read_places, source, batch.endpoint, self.service.limits)
        except FileNotFoundError:
            places, errors = [], [BatchError(code="file_deleted", message="the input file is gone")]
        if errors:
            await self._fail(tenant, batch, errors)
            return None
        batch.request_counts.total = len(places)
        done = await self._answered(tenant, batch)
        if batch.status == "validating":
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
            await self._save(tenant, batch)
        return [place for place in places if place.custom_id not in done]

    async def _answered(self, tenant: str, batch: Batch) -> set[str]:
        """The requests that are answered on disk, counted."""
        paths = [self.files.folder.beside(tenant, batch.id, what) for _, what in RESULTS]
        done, failed = [await self.files.on_disk(answered, path) for path in paths]
        batch.request_counts.completed, batch.request_counts.failed = len(done), len(failed)
        return done | failed

    async def _fail(self, tenant: str, batch: Batch, errors: list[BatchError]) -> None:
        try:
            await self._answered(tenant, batch)
            self._name_results(tenant, batch)
            await self._hand_over(tenant, batch)
        except OSError as error:
            logger.error("what batch %s has answered is lost: %s", batch.id, error)
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(data=errors)
        await self._save(tenant, batch)

    async def _answer_all(self, tenant: str, batch: Batch, waiting: list[Place]) -> None:
        async with asyncio.TaskGroup() as group:
            for place in waiting:
                await self._room.acquire()
                if time.time() >= batch.expires_at and batch.cancelling_at is None:
                    batch.expired_at = int(time.time())
                if batch.cancelling_at is not None or batch.expired_at is not None:
                    self._room.release()
                    return
                task = group.create_task(self._answer(tenant, batch, place))
                task.add_done_callback(lambda _: self._room.release())

    async def _answer(self, tenant: str, batch: Batch, place: Place) -> None:
        folder, on_disk = self.files.folder, self.files.on_disk
        line = await on_disk(read_line, folder.data(tenant, batch.input_file_id), place)
        request_id = f"batch_req_{secrets.token_hex(16)}"
        status, body = await self._ask(tenant, batch.endpoint, bytes(line.body), request_id)
        text = encode_json({
            "id": request_id, "custom_id": place.custom_id, "error": None,
            "response": {"status_code": status, "request_id": request_id, "body": body},
        })  # fmt: skip
        await on_disk(append, folder.beside(tenant, batch.id, "output" if status == 200 else "errors"), text)
        if status == 200:
            batch.request_counts.completed += 1
        else:
            batch.request_counts.failed += 1

    async def _ask(self, tenant: str, endpoint: str, raw: bytes, request_id: str) -> tuple[int, Any]:
        """(status, answer) of one request, at the lowest priority. Waits for as long as nobody could take it."""
        service, operation = self.service, self.operations[endpoint]
        while True:
            try:
                engine = service.ready_engine().for_tenant(tenant)
                with service.flight(request_id, tenant=tenant) as flight:
                    principal = Principal("batch", tenant, frozenset(("user",)))
                    call = Call(service, engine, flight, request_id, time.perf_counter(), principal)
                    body = decode_body(operation.decoder, raw, service.limits)
                    for name in ("stream", "background"):
                        if getattr(body, name, None):
                            raise InvalidRequest(f"{name} is not available in batches", param=name)
                    body.priority = -service.limits.priority_abs
                    flight.programs = programs_named({}, getattr(body, "program", None))
                    answer = await operation.handler(call, body)
                    assert isinstance(answer, bytes)
                    return 200, msgspec.Raw(answer)
            except (Unavailable, Overloaded) as error:
                await asyncio.sleep(error.retry_after)
            except BoughError as error:
                return error.status, error_fields(error)
            except Exception:
                logger.exception("request %s failed", request_id)
                return 500, error_fields(EngineError("the server failed while it handled this request"))

    async def _finish(self, tenant: str, batch: Batch) -> None:
        """Turn what was written into files. The batch names them first, so that this can be done again."""
        now = int(time.time())
        if batch.status != "finalizing":
            batch.status, batch.finalizing_at = "finalizing", now
            self._name_results(tenant, batch)
            await self._save(tenant, batch)
        await self._hand_over(tenant, batch)
        if batch.cancelling_at is not None:
            batch.status, batch.cancelled_at = "cancelled", now
        elif batch.expired_at is not None:
            batch.status = "expired"
        else:
            batch.status, batch.completed_at = "completed", now
        await self._save(tenant, batch)

    def _name_results(self, tenant: str, batch: Batch) -> None:
        for name, what in RESULTS:
            if getattr(batch, name) is None and self.files.folder.beside(tenant, batch.id, what).exists():
                setattr(batch, name, self.files.folder.new_id())

    async def _hand_over(self, tenant: str, batch: Batch) -> None:
        """Turn what was written, which the batch has named, into files."""
        folder, life = self.files.folder, self.service.limits.files_days * DAY
        if batch.output_expires_after is not None:
            life = batch.output_expires_after.seconds
        for name, what in RESULTS:
            path = folder.beside(tenant, batch.id, what)
            if path.exists():
                filename = f"{batch.id}_{what}.jsonl"
                await self.files.on_disk(folder.add, tenant, getattr(batch, name), path, filename, "batch_output", life)


def _tenant(request: Request) -> str:
    return str(request.scope["state"]["principal"].tenant)


def _json(value: Any) -> Response:
    return Response(encode_json(value), media_type="application/json")
