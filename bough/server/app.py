"""The ASGI application: the edge that every request passes, and the routes behind it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bough import __version__
from bough.base.errors import BoughError, EngineError, InvalidRequest, NotFound
from bough.server import adapters, info, schema
from bough.server.anthropic.handlers import count_tokens, messages
from bough.server.anthropic.schema import CountTokensRequest, MessagesRequest
from bough.server.auth import Keyring
from bough.server.chat import chat
from bough.server.completions import completions
from bough.server.dialect import ANTHROPIC, OLLAMA, OPENAI, Dialect, dialect_of
from bough.server.errors import MethodNotAllowed, retry_headers
from bough.server.files.batch import BatchRequest
from bough.server.files.batches import Batches
from bough.server.files.handlers import Files
from bough.server.native import generate
from bough.server.ollama.about import About
from bough.server.ollama.embed import embed, embeddings_of_one
from bough.server.ollama.handlers import ollama_chat, ollama_generate, refuse_management
from bough.server.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from bough.server.paging import PAGED
from bough.server.parsing import parse_function_call, separate_reasoning
from bough.server.pooling.handlers import classify, classify_native, embeddings, encode
from bough.server.pooling.ranking import rerank, score
from bough.server.pooling.schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    EncodeRequest,
    RerankRequest,
    ScoreRequest,
)
from bough.server.program_routes import Programs
from bough.server.responses.handlers import Responses
from bough.server.responses.schema import ResponsesRequest
from bough.server.routes import RouteSpec, install
from bough.server.service import Service
from bough.server.work import Handler, Operation, T, Work

logger = logging.getLogger("bough.server")

BATCHED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
"""Endpoints that batches may name, as far as this server has them."""
_FOLLOWED = {"stream": {"type": "boolean"}, "starting_after": {"type": "integer"}}
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


GONE = 499
"""The status in the log where the client closed its connection, as nginx has it."""


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
        # What every token passes goes past the layers in between, which look at heads alone.
        scope.setdefault("state", {}).update(request_id=request_id, send_body=send)
        service = self.service
        status = 500

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                milliseconds = int((time.perf_counter() - started) * 1000)
                headers = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"openai-processing-ms", str(milliseconds).encode()),
                ]
                if service.draining:
                    headers.append((b"connection", b"close"))
                route = scope.get("route")
                service.metrics.responses.labels(getattr(route, "path", "other"), status).inc()
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        finally:
            del scope["state"]["send_body"]  # which refers to what holds the scope
            if service.config.serve.log_requests != "off":
                _log(scope, GONE if "gone" in scope["state"] else status, time.perf_counter() - started)


class _Cors(CORSMiddleware):
    """Refuses in the one shape of errors."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        kept = {name: value for name, value in response.headers.items() if not name.startswith("content-")}
        body = OPENAI.error(InvalidRequest(bytes(response.body).decode()))
        return Response(body, response.status_code, kept, "application/json")


def _log(scope: Scope, status: int, seconds: float) -> None:
    """One line for a request that is over; nothing that the client wrote but a harmless id. Probes are left out."""
    route, state = scope.get("route"), scope["state"]
    if getattr(route, "scope", None) == "public":
        return
    who = state["principal"].name if "principal" in state else "-"
    path = getattr(route, "path", "no route")
    logger.info(
        "request %s: %s %s for %s: %d in %.0f ms", state["request_id"], scope["method"], path, who, status,
        1000 * seconds,
    )  # fmt: skip


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
    keys = Keyring(service.config.serve)
    service.quota_of = keys.quota
    install(app, _table(service, app), keys.admit)
    if service.config.serve.cors_origin:
        app.add_middleware(
            _Cors, allow_origins=service.config.serve.cors_origin, allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",), expose_headers=("x-request-id", "openai-processing-ms", "retry-after"),
        )  # fmt: skip
    app.add_exception_handler(BoughError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return Edge(app, service)


def _table(service: Service, app: FastAPI) -> list[RouteSpec]:
    about, replies, files, ollama = info.Info(service), Responses(service), Files(service), About(service)
    programs = Programs(service)
    operations: dict[str, Operation[Any]] = {}
    batches = Batches(service, files, operations)

    async def openapi(request: Request) -> Response:
        return info.as_json(app.openapi())

    def work(
        path: str, kind: type[T], handler: Handler[T], dialect: Dialect
    ) -> Callable[[Request], Awaitable[Response]]:
        decoder = schema.decoder(kind)
        if path in BATCHED:
            operations[path] = Operation(decoder, handler)

        async def endpoint(request: Request) -> Response:
            return Work(service, decoder, handler, dialect)

        endpoint.__name__ = handler.__name__
        endpoint.__doc__ = handler.__doc__
        return endpoint

    def post(
        paths: tuple[str, ...], scope: Any, kind: type[T], handler: Handler[T], *more: str, dialect: Dialect = OPENAI
    ) -> RouteSpec:
        return RouteSpec(paths, ("POST", *more), scope, work(paths[0], kind, handler, dialect), kind, dialect)

    return [
        post(("/v1/chat/completions",), "user", schema.ChatRequest, chat),
        post(("/v1/completions",), "user", schema.CompletionRequest, completions),
        post(("/generate",), "user", schema.GenerateRequest, generate, "PUT"),
        post(("/parse_function_call",), "user", schema.ParseCallsRequest, parse_function_call),
        post(("/separate_reasoning",), "user", schema.SeparateReasoningRequest, separate_reasoning),
        post(("/tokenize", "/v1/tokenize"), "user", schema.TokenizeRequest, info.tokenize),
        post(("/detokenize", "/v1/detokenize"), "user", schema.DetokenizeRequest, info.detokenize),
        post(("/abort_request",), "user", schema.AbortRequest, info.abort_request),
        post(("/v1/responses",), "user", ResponsesRequest, replies.create),
        RouteSpec(("/v1/responses/{response_id}",), ("GET",), "user", replies.retrieve, query=_FOLLOWED),
        RouteSpec(("/v1/responses/{response_id}",), ("DELETE",), "user", replies.delete),
        RouteSpec(("/v1/responses/{response_id}/cancel",), ("POST",), "user", replies.cancel),
        RouteSpec(("/v1/responses/{response_id}/input_items",), ("GET",), "user", replies.items, query=PAGED),
        RouteSpec(("/v1/files",), ("POST",), "user", files.upload),
        RouteSpec(("/v1/files",), ("GET",), "user", files.listing, query=PAGED | {"purpose": {"type": "string"}}),
        RouteSpec(("/v1/files/{file_id}",), ("GET",), "user", files.retrieve),
        RouteSpec(("/v1/files/{file_id}",), ("DELETE",), "user", files.delete),
        RouteSpec(("/v1/files/{file_id}/content",), ("GET",), "user", files.content),
        post(("/v1/batches",), "user", BatchRequest, batches.create),
        RouteSpec(("/v1/batches",), ("GET",), "user", batches.listing, query=PAGED),
        RouteSpec(("/v1/batches/{batch_id}",), ("GET",), "user", batches.retrieve),
        RouteSpec(("/v1/batches/{batch_id}/cancel",), ("POST",), "user", batches.cancel),
        post(("/v1/load_lora_adapter",), "admin", schema.LoadAdapterRequest, adapters.load),
        post(("/v1/unload_lora_adapter",), "admin", schema.UnloadAdapterRequest, adapters.unload),
        post(("/load_lora_adapter",), "admin", schema.LoadAdapterRequest, adapters.load_native),
        post(("/unload_lora_adapter",), "admin", schema.UnloadAdapterRequest, adapters.unload_native),
        RouteSpec(("/v1/programs",), ("GET",), "user", programs.listing),
        RouteSpec(("/v1/programs/{program_id:path}/end",), ("POST",), "user", programs.end),
        RouteSpec(("/v1/programs/{program_id:path}/cancel",), ("POST",), "user", programs.cancel),
        RouteSpec(("/v1/programs/{program_id:path}",), ("GET",), "user", programs.retrieve),
        RouteSpec(("/v1/models",), ("GET",), "user", about.models),
        RouteSpec(("/v1/models/{model:path}",), ("GET",), "user", about.model),
        RouteSpec(("/get_model_info", "/model_info"), ("GET",), "user", about.model_info),
        RouteSpec(("/server_info", "/get_server_info"), ("GET",), "admin", about.server_info),
        RouteSpec(
            ("/flush_cache",), ("GET", "POST"), "admin", about.flush_cache, query={"timeout": {"type": "number"}}
        ),
        RouteSpec(("/health", "/livez"), ("GET",), "public", about.health),
        RouteSpec(("/readyz", "/health_generate"), ("GET",), "public", about.readyz),
        RouteSpec(("/metrics",), ("GET",), "public", about.metrics),
        RouteSpec(("/openapi.json",), ("GET",), "user", openapi),
        post(("/v1/embeddings",), "user", EmbeddingsRequest, embeddings),
        post(("/v1/classify",), "user", ClassifyRequest, classify),
        post(("/v1/score", "/score"), "user", ScoreRequest, score),
        post(("/v1/rerank", "/v2/rerank", "/rerank"), "user", RerankRequest, rerank),
        post(("/encode",), "user", EncodeRequest, encode, "PUT"),
        post(("/classify",), "user", ClassifyRequest, classify_native, "PUT"),
        post(("/v1/messages",), "user", MessagesRequest, messages, dialect=ANTHROPIC),
        post(("/v1/messages/count_tokens",), "user", CountTokensRequest, count_tokens, dialect=ANTHROPIC),
        post(("/api/chat",), "user", OllamaChatRequest, ollama_chat, dialect=OLLAMA),
        post(("/api/generate",), "user", OllamaGenerateRequest, ollama_generate, dialect=OLLAMA),
        post(("/api/embed",), "user", OllamaEmbedRequest, embed, dialect=OLLAMA),
        post(("/api/embeddings",), "user", OllamaEmbeddingsRequest, embeddings_of_one, dialect=OLLAMA),
        post(("/api/show",), "user", OllamaShowRequest, ollama.show, dialect=OLLAMA),
        post(
            ("/api/pull", "/api/push", "/api/create", "/api/copy"),
            "user",
            schema.Empty,
            refuse_management,
            dialect=OLLAMA,
        ),
        RouteSpec(
            ("/api/delete",), ("DELETE",), "user", work("", schema.Empty, refuse_management, OLLAMA), None, OLLAMA
        ),
        RouteSpec(("/api/tags",), ("GET",), "user", ollama.tags, dialect=OLLAMA),
        RouteSpec(("/api/ps",), ("GET",), "user", ollama.ps, dialect=OLLAMA),
        RouteSpec(("/api/version",), ("GET",), "user", ollama.version, dialect=OLLAMA),
        RouteSpec(("/",), ("GET", "HEAD"), "public", ollama.running, dialect=OLLAMA),
    ]


def _respond(request: Request, error: BoughError) -> Response:
    dialect: Dialect = getattr(request.scope.get("route"), "dialect", None) or dialect_of(request.url.path)
    response = Response(dialect.error(error), error.status, media_type="application/json")
    response.raw_headers += retry_headers(error)
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BoughError)
    return _respond(request, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return _respond(request, NotFound(f"there is no {request.method} {request.url.path[:256]}"))
    if error.status_code == 405:
        response = _respond(request, MethodNotAllowed(f"{request.method} is not allowed here"))
        response.headers.update(error.headers or {})
        return response
    return _respond(request, InvalidRequest(str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    return _respond(request, EngineError("the server failed while it handled this request"))
