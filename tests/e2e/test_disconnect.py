"""A client that goes away frees what its request held, wherever the request is; and bounded waiting."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .serving import TINY, Server, running, wait_for

GHOST_SECONDS = 0.5
"""Of the engine's time, after which nothing may be held for a client that has gone."""
ENDLESS = 30000


@pytest.fixture(scope="module")
def narrow(long_model: Path) -> Iterator[Server]:
    """A server that runs two sequences at a time."""
    with running(str(long_model), *TINY, "--max-running", "2") as server:
        yield server


class Client:
    """One connection on which one request was sent."""

    def __init__(self, server: Server, prompt: list[int], *, stream: bool, max_tokens: int = ENDLESS) -> None:
        body = json.dumps({
            "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
        }).encode()  # fmt: skip
        self.socket = socket.create_connection(("127.0.0.1", server.port), 10)
        self.socket.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )

    def begun(self) -> None:
        """Wait for the first piece of the answer."""
        assert self.socket.recv(4096).startswith(b"HTTP/1.1 200")

    def leave(self) -> None:
        self.socket.close()


@contextmanager
def within(server: Server, seconds: float) -> Iterator[None]:
    """What happens inside happens before the engine, which is decoding meanwhile, has worked ``seconds``."""
    began = server.engine_seconds
    yield
    assert server.engine_seconds - began < seconds


def gone(server: Server, leave: Any, before: dict[str, Any], n: int) -> None:
    """``leave`` and check that the engine has let go of everything in time, by ``n`` aborts."""
    aborted, disconnected = before["aborted"] + n, server.counter("bough_disconnected_total")
    with within(server, GHOST_SECONDS):
        leave()
        stats = server.quiet()
    assert stats["aborted"] == aborted
    assert server.counter("bough_disconnected_total") == disconnected + n


@pytest.mark.parametrize("stream", [True, False])
def test_while_decoding(narrow: Server, stream: bool) -> None:
    before = narrow.quiet()
    client = Client(narrow, [11, 12, 13], stream=stream)
    if stream:
        client.begun()
    wait_for(lambda: narrow.stats()["generated_tokens"] > before["generated_tokens"])
    assert narrow.stats()["locked_tokens"] > 0
    gone(narrow, client.leave, before, 1)


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_middle_of_a_long_prompt(narrow: Server, stream: bool) -> None:
    before = narrow.quiet()
    prompt = [3 + (k * k + stream) % 250 for k in range(32000)]
    client = Client(narrow, prompt, stream=stream, max_tokens=10)
    wait_for(lambda: narrow.stats()["computed_tokens"] > before["computed_tokens"])
    gone(narrow, client.leave, before, 1)
    stats = narrow.quiet()
    assert stats["generated_tokens"] == before["generated_tokens"]
    assert stats["computed_tokens"] - before["computed_tokens"] < len(prompt), "the prompt ended too early"


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_queue(narrow: Server, stream: bool) -> None:
    before = narrow.quiet()
    ahead = [Client(narrow, [21 + i], stream=True) for i in range(2)]
    for client in ahead:
        client.begun()
    waiting = Client(narrow, [31], stream=stream)
    wait_for(lambda: narrow.stats()["waiting"] == 1)
    with within(narrow, GHOST_SECONDS):
        waiting.leave()
        wait_for(lambda: narrow.stats()["waiting"] == 0)
    assert narrow.stats()["aborted"] == before["aborted"] + 1
    assert narrow.stats()["running"] == 2
    before["aborted"] += 1
    gone(narrow, lambda: [client.leave() for client in ahead], before, 2)


def test_with_several_sequences(narrow: Server) -> None:
    before = narrow.quiet()
    with httpx.stream("POST", narrow.url + "/v1/chat/completions", timeout=10, json={
        "messages": [{"role": "user", "content": "the cat"}], "n": 5, "max_tokens": ENDLESS - 100, "stream": True,
        "ignore_eos": True,
    }) as response:  # fmt: skip
        next(response.iter_lines())
        began = narrow.engine_seconds
    stats = narrow.quiet()
    assert narrow.engine_seconds - began < GHOST_SECONDS
    assert stats["aborted"] == before["aborted"] + 5


def test_while_its_body_is_read(narrow: Server) -> None:
    narrow.quiet()
    beside = Client(narrow, [41], stream=True)
    beside.begun()
    connection = socket.create_connection(("127.0.0.1", narrow.port))
    connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{")
    wait_for(lambda: narrow.info()["requests_in_flight"] == 2)
    with within(narrow, GHOST_SECONDS):
        connection.close()
        wait_for(lambda: narrow.info()["requests_in_flight"] == 1)
    beside.leave()
    narrow.quiet()


def test_a_full_queue(narrow: Server) -> None:
    """Four requests with a thousand sequences each are all that may be in flight."""
    before = narrow.quiet()
    limits = narrow.info()["limits"]
    n, most = limits["sequences"], limits["queue_requests"]
    assert most % n == 0
    sockets = []
    for i in range(most // n):
        body = json.dumps({
            "input_ids": [[10 + i, 20]] * n, "sampling_params": {"max_new_tokens": ENDLESS, "ignore_eos": True},
        }).encode()  # fmt: skip
        sockets.append(socket.create_connection(("127.0.0.1", narrow.port), 10))
        sockets[-1].sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    wait_for(lambda: narrow.stats()["waiting"] + narrow.stats()["running"] == most)
    refused = narrow.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    assert narrow.counter("bough_overloaded_total") >= 1
    assert narrow.get("/readyz").status_code == 200
    with within(narrow, 3.0):
        for connection in sockets:
            connection.close()
        assert narrow.quiet()["aborted"] == before["aborted"] + most
    assert narrow.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_timeouts(long_model: Path) -> None:
    with running(str(long_model), *TINY, "--request-timeout", "0.5") as server:
        endless = {"prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}
        began = time.monotonic()
        with within(server, 1.0):
            answer = server.post("/v1/completions", endless)
        assert time.monotonic() - began >= 0.5
        assert answer.status_code == 408 and "timeout" in answer.json()["error"]["message"]
        # A client may ask for less, and not for more.
        with within(server, 0.4):
            assert server.post("/v1/completions", {**endless, "timeout": 0.1}).status_code == 408
        assert server.post("/v1/completions", {**endless, "timeout": 100}).status_code == 408
        stream = server.post("/v1/completions", {**endless, "stream": True})
        pieces = stream.text.strip().split("\n\n")
        assert stream.status_code == 200 and len(pieces) > 3 and pieces[-1] == "data: [DONE]"
        assert "timeout" in json.loads(pieces[-2].removeprefix("data: "))["error"]["message"]
        server.quiet()
