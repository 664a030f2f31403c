"""Programs over HTTP: what the engine knows of them, and their ends. :mod:`bough.server.programs` has the envelope."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bough.base.errors import EngineError, NotFound
from bough.base.messages import ControlOp
from bough.base.program import ProgramInfo
from bough.server.info import as_json
from bough.server.paging import page
from bough.server.service import Flight, Service

LISTED, MOST_LISTED = 20, 1000
"""Programs on a page unless it is asked for more, and at most."""
LOOK_SECONDS = 0.05
"""Until an end looks again whether the requests that came before it have reached the engine."""


class Programs:
    """What the engine knows of a tenant's programs, and their ends."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def listing(self, request: Request) -> Response:
        """GET /v1/programs: those that have requests, and the latest of those that may come back.

        The newest are those whose first requests are still read here.
        """
        coming: dict[str, list[Flight]] = {}
        for flight in self._service.arriving(request.scope["state"]["principal"].tenant):
            for name in sorted(flight.programs):
                coming.setdefault(name, []).append(flight)
        found = await self._ask("programs", request)
        known = {info.id for info in found}
        found += [_unread(name, flights) for name, flights in coming.items() if name not in known]
        entries = [_shown(info) for info in found]
        return as_json(page(request, entries, default=LISTED, most=MOST_LISTED))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/programs/{id}. One whose first requests are still read here has calls, and nothing else yet."""
        name = request.path_params["program_id"]
        arriving = self._arriving(request)
        try:
            (found,) = await self._ask("programs", request, program=name)
        except NotFound:
            if not arriving:
                raise
            found = _unread(name, arriving)
        return as_json(_shown(found))

    async def end(self, request: Request) -> Response:
        """POST /v1/programs/{id}/end: no more requests will come; those that there are finish.

        Those that are still read here are the program's too, so it is answered when they are in the engine, or refused.
        """
        coming = self._arriving(request)
        while True:
            if not any(flight.programs for flight in coming):
                try:
                    return await self._close("end_program", request)
                except NotFound:
                    if not coming:
                        raise
                    if not any(self._service.flies(flight) for flight in coming):
                        return _closed("end_program", request)
            await asyncio.sleep(LOOK_SECONDS)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/programs/{id}/cancel: all its requests stop, in whatever state they are."""
        arriving = self._arriving(request)
        for flight in arriving:
            flight.cancelled = request.path_params["program_id"]
        try:
            return await self._close("cancel_program", request)
        except NotFound:
            if not arriving:
                raise
            return _closed("cancel_program", request)

    def _arriving(self, request: Request) -> list[Flight]:
        tenant = request.scope["state"]["principal"].tenant
        name = request.path_params["program_id"]
        return [flight for flight in self._service.arriving(tenant) if name in flight.programs]

    async def _close(self, op: ControlOp, request: Request) -> Response:
        name = request.path_params["program_id"]
        self._service.texts.forget(request.scope["state"]["principal"].tenant, name)
        await self._ask(op, request, program=name)
        return _closed(op, request)

    async def _ask(self, op: ControlOp, request: Request, **args: str) -> list[ProgramInfo]:
        engine = self._service.ready_engine()
        reply = await engine.client.control(op, tenant=request.scope["state"]["principal"].tenant, **args)
        if not reply.ok:
            raise (NotFound if reply.info.get("status") == 404 else EngineError)(reply.message)
        return reply.programs


def _closed(op: ControlOp, request: Request) -> Response:
    status = "ended" if op == "end_program" else "cancelled"
    return as_json({"id": request.path_params["program_id"], "object": "program", "status": status})


def _unread(id: str, arriving: list[Flight]) -> ProgramInfo:
    """A program of which only the requests ``arriving`` are known."""
    return ProgramInfo(
        id=id, node="", age=time.monotonic() - arriving[0].started, idle=None, calls=len(arriving), running=0,
        waiting=len(arriving), prompt_tokens=0, cached_tokens=0, generated_tokens=0, kept_tokens=0, service=0,
        budget=None, deadline=None, pause=None, priority=0, seated=False,
    )  # fmt: skip


def _shown(info: ProgramInfo) -> dict[str, Any]:
    return {**msgspec.to_builtins(info), "object": "program", "status": "idle" if info.idle is not None else "active"}
