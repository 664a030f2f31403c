"""The ASGI application: the edge that every request passes, and the routes behind it."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough import __version__
from bough.base.errors import BoughError, EngineError, InvalidRequest, NotFound
from bough.server import info, schema
from bough.server.chat import chat
from bough.server.completions import completions
from bough.server.errors import MethodNotAllowed, error_body, retry_headers
from bough.server.native import generate
from bough.server.routes import RouteSpec, install
from bough.server.service import Service
from bough.server.work import Handler, T, Work

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Edge:
    """Outermost layer: request ids, times, status counts, and an honest Connection header while draining."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        service = self.service

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                milliseconds = int((time.perf_counter() - started) * 1000)
                headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(milliseconds).encode()),
                ]
                if service.draining:
                    headers.append((b"connection", b"close"))
                route = scope.get("route")
                service.metrics.responses.labels(getattr(route, "path", "other"), message["status"]).inc()
                message = {**message, "headers": headers}
            await send(message)

        await self.app(scope, receive, send_marked)


def _request_id(scope: Scope) -> str:
    """The client's own id where it sent a harmless one, or a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value.decode())
    return uuid.uuid4().hex


def create_app(service: Service) -> ASGIApp:
    """The whole application over ``service``. Raises ConfigError when a route declares no scope."""
    app = FastAPI(title="bough", version=__version__, openapi_url=None, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    install(app, _table(service, app))
    app.add_exception_handler(BoughError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return Edge(app, service)


def _table(service: Service, app: FastAPI) -> list[RouteSpec]:
    about = info.Info(service)

    async def openapi(request: Request) -> Response:
        return info.as_json(app.openapi())

    def work(kind: type[T], handler: Handler[T]) -> Callable[[Request], Awaitable[Response]]:
        decoder = schema.decoder(kind)

        async def endpoint(request: Request) -> Response:
            return Work(service, decoder, handler)

        endpoint.__name__ = handler.__name__
        endpoint.__doc__ = handler.__doc__
        return endpoint

    def post(paths: tuple[str, ...], scope: Any, kind: type[T], handler: Handler[T], *more: str) -> RouteSpec:
        return RouteSpec(paths, ("POST", *more), scope, work(kind, handler), kind)

    return [
        post(("/v1/chat/completions",), "user", schema.ChatRequest, chat),
        post(("/v1/completions",), "user", schema.CompletionRequest, completions),
        post(("/generate",), "user", schema.GenerateRequest, generate, "PUT"),
        post(("/tokenize", "/v1/tokenize"), "user", schema.TokenizeRequest, info.tokenize),
        post(("/detokenize", "/v1/detokenize"), "user", schema.DetokenizeRequest, info.detokenize),
        post(("/abort_request",), "admin", schema.AbortRequest, info.abort_request),
        RouteSpec(("/v1/models",), ("GET",), "user", about.models),
        RouteSpec(("/v1/models/{model:path}",), ("GET",), "user", about.model),
        RouteSpec(("/get_model_info", "/model_info"), ("GET",), "user", about.model_info),
        RouteSpec(("/server_info", "/get_server_info"), ("GET",), "admin", about.server_info),
        RouteSpec(("/flush_cache",), ("GET", "POST"), "admin", about.flush_cache),
        RouteSpec(("/health", "/livez"), ("GET",), "public", about.health),
        RouteSpec(("/readyz", "/health_generate"), ("GET",), "public", about.readyz),
        RouteSpec(("/metrics",), ("GET",), "public", about.metrics),
        RouteSpec(("/openapi.json",), ("GET",), "user", openapi),
    ]


def _respond(error: BoughError) -> Response:
    response = Response(error_body(error), error.status, media_type="application/json")
    response.raw_headers += retry_headers(error)
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BoughError)
    return _respond(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _respond(NotFound(f"there is no {request.method} {request.url.path[:256]}"))
    if error.status_code == 405:
        response = _respond(MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return _respond(InvalidRequest(str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    return _respond(EngineError("the server failed while it handled this request"))
