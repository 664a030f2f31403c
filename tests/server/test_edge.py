"""The HTTP edge: heads, bodies, ids, scopes."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import weakref
from dataclasses import replace

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message

from bough.base.errors import ConfigError, InvalidRequest
from bough.base.limits import Limits
from bough.server.app import create_app
from bough.server.body import check_depth, decode_body
from bough.server.routes import SCOPES, ScopedRoute, check_scopes
from bough.server.schema import CompletionRequest, decoder
from bough.server.service import Service

from .scripted import Running, make_config, running_server, wait_for

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("[]{}\"\\ a", max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("[]{}\"\\", max_size=4), inner, max_size=4),
    max_leaves=30,
)  # fmt: skip


def depth(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 0


@given(json_values, st.integers(0, 6))
@settings(max_examples=400, deadline=None)
def test_depth_is_that_of_the_parsed_value(value: object, limit: int) -> None:
    body = json.dumps(value).encode()
    if depth(value) <= limit:
        check_depth(body, limit)
    else:
        with pytest.raises(InvalidRequest):
            check_depth(body, limit)


@pytest.mark.parametrize("body", [
    b"[" * 8_000_000, b"[]" * 4_000_000, b'{"a":[' * 1_000_000, b'"' + b"[" * 8_000_000 + b'"', b"\\" * 8_000_000,
])  # fmt: skip
def test_depth_of_large_bodies_is_linear(body: bytes) -> None:
    try:
        check_depth(body, 32)
    except InvalidRequest:
        pass


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    try:
        decode_body(decoder(CompletionRequest), body, Limits())
    except InvalidRequest as error:
        assert error.message


def test_whole_numbers_may_be_floats() -> None:
    body = decode_body(decoder(CompletionRequest), b'{"prompt": "a", "max_tokens": 16.0, "temperature": 1}', Limits())
    assert body.max_tokens == 16 and body.temperature == 1.0


def exchange(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize(("data", "status"), [
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000, 431),
    (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 431),
    (b"GET /health HTTP/1.1\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(101)) + b"\r\n", 431),
    (b"nonsense\r\n\r\n", 400),
    (b"POST /generate HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", 413),
    (b"POST /generate HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\n", 415),
    (b"POST /generate HTTP/1.1\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\n", 415),
])  # fmt: skip
def test_bounds_on_the_head(server: Running, data: bytes, status: int) -> None:
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_head_just_within_the_bounds(server: Running) -> None:
    head = b"GET /health HTTP/1.1\r\nConnection: close\r\n" + b"".join(b"a%d: b\r\n" % i for i in range(98)) + b"\r\n"
    assert exchange(server, head).startswith(b"HTTP/1.1 200 ")


def test_body_over_the_limit_without_a_length(server: Running) -> None:
    def chunks() -> object:
        for _ in range(20):
            yield b" " * (1 << 20)

    try:
        answer = httpx.post(f"{server.url}/generate", content=chunks(), headers={"Content-Type": "application/json"})  # type: ignore[arg-type]
        assert answer.status_code == 413
    except httpx.WriteError:
        pass  # the server may close before everything is written


def test_slow_clients_are_cut_off() -> None:
    with running_server(limits=replace(Limits(), read_seconds=0.2)) as server:
        assert exchange(server, b"") == b""
        assert exchange(server, b"POST /generate HTT") == b""
        head = b"POST /generate HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        assert exchange(server, head + b'{"text"').startswith(b"HTTP/1.1 408 ")
        wait_for(lambda: server.service.in_flight == 0)


def test_request_ids(server: Running) -> None:
    answer = httpx.get(f"{server.url}/health", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1" and "openai-processing-ms" in answer.headers
    answer = httpx.get(f"{server.url}/health", headers={"x-request-id": "a" * 200})
    assert len(answer.headers["x-request-id"]) == 32


def test_unknown_paths_and_methods(server: Running) -> None:
    missing = httpx.get(f"{server.url}/v2/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "invalid_request_error"
    wrong = httpx.get(f"{server.url}/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "method_not_allowed"
    assert wrong.headers["allow"] == "POST"


def test_errors_are_nested_and_flat(server: Running) -> None:
    body = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "n": 0}).json()
    assert body["error"]["param"] == body["param"] == "n"
    assert body["object"] == "error" and body["message"] == body["error"]["message"]
    assert (body["type"], body["code"]) == ("invalid_request_error", 400)


def test_a_request_that_is_over_is_let_go_without_the_collector() -> None:
    class Connection:
        def __init__(self) -> None:
            self.scope = {"type": "http", "method": "GET", "path": "/nowhere", "headers": [], "query_string": b""}
            self.status = 0

        async def receive(self) -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(self, message: Message) -> None:
            self.status = message.get("status", self.status)

    edge, connection = create_app(Service(make_config())), Connection()
    alive = weakref.ref(connection)
    gc.disable()
    try:
        asyncio.run(edge(connection.scope, connection.receive, connection.send))
        assert connection.status == 404
        del connection
        assert alive() is None
    finally:
        gc.enable()


def test_every_route_has_a_scope() -> None:
    edge = create_app(Service(make_config()))
    app: FastAPI = edge.app  # type: ignore[attr-defined]
    routes = [route for route in app.router.routes if isinstance(route, ScopedRoute)]
    scopes = {(method, route.path): route.scope for route in routes for method in route.methods or ()}
    assert len(scopes) == len(app.router.routes)
    assert set(scopes.values()) <= set(SCOPES)
    assert {path for (_, path), scope in scopes.items() if scope == "public"} == {
        "/", "/health", "/livez", "/readyz", "/health_generate", "/metrics",
    }  # fmt: skip
    assert {path for (_, path), scope in scopes.items() if scope == "admin"} == {
        "/flush_cache", "/server_info", "/get_server_info", "/load_lora_adapter", "/unload_lora_adapter",
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    }  # fmt: skip


def test_a_route_without_scope_does_not_start() -> None:
    app = FastAPI(openapi_url=None)

    @app.get("/open")
    def open_door() -> None: ...

    with pytest.raises(ConfigError, match="/open"):
        check_scopes(app)


def test_request_types_have_a_json_schema() -> None:
    schema = msgspec.json.schema(CompletionRequest)
    assert "prompt" in schema["$defs"]["CompletionRequest"]["properties"]
