"""Programs over HTTP: what the engine knows of them, and their ends. :mod:`bough.server.programs` has the envelope."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from bough.base.errors import EngineError, NotFound
from bough.base.messages import ControlOp
from bough.base.program import ProgramInfo
from bough.server.info import as_json
from bough.server.paging import page
from bough.server.service import Service

LISTED, MOST_LISTED = 20, 1000
"""Programs on a page unless it is asked for more, and at most."""


class Programs:
    """What the engine knows of a tenant's programs, and their ends."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def listing(self, request: Request) -> Response:
        """GET /v1/programs: those that have requests, and the latest of those that may come back."""
        entries = [_shown(found) for found in await self._ask("programs", request)]
        return as_json(page(request, entries, default=LISTED, most=MOST_LISTED))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/programs/{id}."""
        (found,) = await self._ask("programs", request, program=request.path_params["program_id"])
        return as_json(_shown(found))

    async def end(self, request: Request) -> Response:
        """POST /v1/programs/{id}/end: no more requests will come; those that there are finish."""
        return await self._close("end_program", request)

    async def cancel(self, request: Request) -> Response:
        """POST /v1/programs/{id}/cancel: all its requests stop, in whatever state they are."""
        return await self._close("cancel_program", request)

    async def _close(self, op: ControlOp, request: Request) -> Response:
        name = request.path_params["program_id"]
        self._service.texts.forget(request.scope["state"]["principal"].tenant, name)
        await self._ask(op, request, program=name)
        return as_json({"id": name, "object": "program", "status": "ended" if op == "end_program" else "cancelled"})

    async def _ask(self, op: ControlOp, request: Request, **args: str) -> list[ProgramInfo]:
        engine = self._service.ready_engine()
        reply = await engine.client.control(op, tenant=request.scope["state"]["principal"].tenant, **args)
        if not reply.ok:
            raise (NotFound if reply.info.get("status") == 404 else EngineError)(reply.message)
        return reply.programs


def _shown(info: ProgramInfo) -> dict[str, Any]:
    return {**msgspec.to_builtins(info), "object": "program", "status": "idle" if info.idle is not None else "active"}
