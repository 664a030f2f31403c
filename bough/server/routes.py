"""The table of routes. Every route declares who may use it; one without a scope does not start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from bough.base.errors import ConfigError

Scope = Literal["public", "user", "admin"]
"""public: probes and metrics; user: anyone who may generate; admin: whoever operates the server."""

SCOPES = ("public", "user", "admin")


@dataclass(frozen=True, slots=True)
class RouteSpec:
    """One endpoint under all its paths. ``body`` is the type that its JSON must have, for the OpenAPI document."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    scope: Scope
    endpoint: Callable[[Request], Awaitable[Response]]
    body: Any = None


class ScopedRoute(APIRoute):
    """A route that knows who may use it."""

    scope: Scope


def install(app: FastAPI, specs: Sequence[RouteSpec]) -> None:
    """Add all routes to ``app``, check the whole of it, and complete its OpenAPI document."""
    schemas: dict[str, Any] = {}
    for spec in specs:
        for path in spec.paths:
            for method in spec.methods:
                extra = None if spec.body is None else {"requestBody": _request_body(spec.body, schemas)}
                route = ScopedRoute(
                    path, spec.endpoint, methods=[method], response_model=None, openapi_extra=extra,
                    operation_id=f"{method.lower()}{path}",
                )  # fmt: skip
                route.scope = spec.scope
                app.router.routes.append(route)
    check_scopes(app)
    document = app.openapi()
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)


def check_scopes(app: FastAPI) -> None:
    """Raises ConfigError for any route of ``app`` that does not declare a scope."""
    for route in app.router.routes:
        if getattr(route, "scope", None) not in SCOPES:
            raise ConfigError(f"the route {getattr(route, 'path', route)!r} declares no scope")


def _request_body(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI entry of a body; the types that it refers to are added to ``schemas``."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    schemas.update(components)
    return {"content": {"application/json": {"schema": schema}}, "required": True}
