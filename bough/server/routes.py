"""The table of routes. Every route declares who may use it; one without a scope does not start."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from bough.base.errors import ConfigError
from bough.server.dialect import OPENAI, Dialect

Scope = Literal["public", "user", "admin"]
"""public: probes and metrics; user: anyone who may generate; admin: whoever operates the server."""

SCOPES = ("public", "user", "admin")


Guard = Callable[[Connection, Scope], object]
"""Says who is asking on a connection for a route of a scope; raises what refuses them."""


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One endpoint under all its paths.

    For the OpenAPI document: ``body`` is the type that its JSON must have, ``query`` has the JSON Schemas of what may
    stand behind the question mark.
    """

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    scope: Scope
    endpoint: Callable[[Request], Awaitable[Response]]
    body: Any = None
    dialect: Dialect = OPENAI
    query: Mapping[str, Any] = field(default_factory=dict)


class ScopedRoute(APIRoute):
    """A route that knows who may use it and lets nobody else through, whatever the method."""

    scope: Scope
    guard: Guard
    dialect: Dialect

    async def handle(self, scope: Connection, receive: Receive, send: Send) -> None:
        scope["state"]["principal"] = self.guard(scope, self.scope)
        await super().handle(scope, receive, send)


def install(app: FastAPI, specs: Sequence[RouteSpec], guard: Guard) -> None:
    """Add all routes to ``app``, check the whole of it, and complete its OpenAPI document."""
    schemas: dict[str, Any] = {}
    for spec in specs:
        for path in spec.paths:
            for method in spec.methods:
                extra: dict[str, Any] = {"parameters": [*_path_parameters(path), *_query_parameters(spec.query)]}
                if spec.body is not None:
                    extra["requestBody"] = _request_body(spec.body, schemas)
                route = ScopedRoute(
                    path, spec.endpoint, methods=[method], response_model=None, openapi_extra=extra,
                    operation_id=f"{method.lower()}{path}",
                )  # fmt: skip
                route.scope = spec.scope
                route.guard = guard
                route.dialect = spec.dialect
                app.router.routes.append(route)
    check_scopes(app)
    document = app.openapi()
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)


def check_scopes(app: FastAPI) -> None:
    """Raises ConfigError for any route of ``app`` that does not declare a scope."""
    for route in app.router.routes:
        if getattr(route, "scope", None) not in SCOPES:
            raise ConfigError(f"the route {getattr(route, 'path', route)!r} declares no scope")


def _path_parameters(path: str) -> list[dict[str, Any]]:
    """The OpenAPI entries of the names in ``path``."""
    names = re.findall(r"\{(\w+)(?::\w+)?\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(query: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in query.items()]


def _request_body(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI entry of a body; the types that it refers to are added to ``schemas``."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schemas.update(components)
    return {"content": {"application/json": {"schema": schema}}, "required": True}
