"""What happens around a request: overload, disconnects, aborts, faults of the engine, readiness, shutdown."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from bough.base.limits import Limits
from bough.base.messages import Finish

from .scripted import (
    MODEL,
    PATIENCE,
    Running,
    expected_text,
    make_engine,
    make_tokenizer,
    running_server,
    wait_for,
)

LONG: Any = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture
def slow() -> Iterator[Running]:
    """A server whose long request takes many seconds."""
    with running_server(step_seconds=0.01) as running:
        yield running


def post(server: Running, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def open_request(server: Running, path: str, body: Any) -> socket.socket:
    """A connection with a request on it, not yet answered."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    sock = socket.create_connection(("127.0.0.1", server.port), PATIENCE)
    sock.sendall(head.encode() + data)
    return sock


@contextmanager
def within(server: Running, seconds: float) -> Iterator[None]:
    """What happens inside takes less than ``seconds`` by the turns of the server's loop, however busy the machine."""
    began = server.client.turns
    yield
    assert (server.client.turns - began) * server.client.step_seconds < seconds


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_disconnect_aborts(slow: Running, path: str, stream: bool, reset: bool) -> None:
    body: dict[str, Any] = {**LONG, "stream": stream, "n": 2}
    if path == "/generate":
        sampling = {"max_new_tokens": 2000, "ignore_eos": True, "n": 2}
        body = {"text": "hello", "stream": stream, "sampling_params": sampling}
    elif "chat" in path:
        body = {**body, "messages": [{"role": "user", "content": "x"}]}
    sock = open_request(slow, path, body)
    wait_for(lambda: len(slow.client.running) == 2 and all(s.index >= 2 for s in list(slow.client.running.values())))
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    with within(slow, 0.5):
        sock.close()
        wait_for(lambda: not slow.client.running)
    wait_for(lambda: slow.service.in_flight == 0)
    assert slow.service.sequences == 0 and len(slow.client.aborted) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_who_left_is_told_in_the_log(slow: Running, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "bough")
    sock = open_request(slow, "/v1/completions", {**LONG, "stream": stream, "rid": "left"})
    wait_for(lambda: len(slow.client.running) == 1)
    sock.close()
    wait_for(lambda: any("/v1/completions" in record.getMessage() for record in caplog.records))
    [line] = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert ": 499 in " in line


def test_disconnect_of_a_batch_aborts_all(slow: Running) -> None:
    sock = open_request(slow, "/v1/completions", {**LONG, "prompt": [f"p{i}" for i in range(10)], "stream": True})
    wait_for(lambda: len(slow.client.running) == 10)
    with within(slow, 0.5):
        sock.close()
        wait_for(lambda: not slow.client.running)


def test_pipelined_disconnect_aborts(slow: Running) -> None:
    sock = open_request(slow, "/v1/completions", {**LONG, "stream": True})
    sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    wait_for(lambda: len(slow.client.running) == 1)
    with within(slow, 0.5):
        sock.close()
        wait_for(lambda: not slow.client.running)


def test_no_abort_after_a_natural_end(slow: Running) -> None:
    for stream in (False, True):
        post(slow, "/v1/completions", {"prompt": "hello", "max_tokens": 2, "stream": stream})
    assert slow.client.aborted == []


def test_abort_request(slow: Running) -> None:
    answers: dict[str, Any] = {}

    def generate(rid: str) -> None:
        body = {"text": "hello", "rid": rid, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True, "n": 2}}
        answers[rid] = post(slow, "/generate", body).json()

    threads = [threading.Thread(target=generate, args=(rid,)) for rid in ("a", "ab", "a-b")]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(slow.client.running) == 6)
    assert post(slow, "/abort_request", {"rid": "a"}).json() == {"aborted": 2}
    threads[0].join(PATIENCE)
    assert [a["meta_info"]["finish_reason"]["type"] for a in answers["a"]] == ["abort", "abort"]
    assert sorted(slow.client.aborted) == ["a-0", "a-1"]
    assert post(slow, "/abort_request", {"abort_all": True}).json() == {"aborted": 4}
    for thread in threads:
        thread.join(PATIENCE)
    assert not slow.client.running
    assert post(slow, "/abort_request", {}).status_code == 400


def test_aborted_openai_request_is_an_error(slow: Running) -> None:
    with open_request(slow, "/v1/completions", {**LONG, "rid": "x", "stream": True}) as sock:
        wait_for(lambda: any(s.index > 1 for s in list(slow.client.running.values())))
        post(slow, "/abort_request", {"rid": "x"})
        text = read_all_events(sock)
    assert '"code":"aborted"' in text and text.count('"error":{') == 1


def read_all_events(sock: socket.socket) -> str:
    data = b""
    while b"data: [DONE]" not in data:
        piece = sock.recv(65536)
        assert piece, data
        data += piece
    return data.decode()


def test_duplicate_rid(slow: Running) -> None:
    with open_request(slow, "/v1/completions", {**LONG, "rid": "same"}):
        wait_for(lambda: len(slow.client.running) == 1)
        answer = post(slow, "/v1/completions", {**LONG, "rid": "same"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "duplicate_rid"
    wait_for(lambda: not slow.client.running)
    assert post(slow, "/v1/completions", {"prompt": "a", "max_tokens": 1, "rid": "same"}).status_code == 200


def test_bound_on_sequences_in_flight() -> None:
    with running_server(step_seconds=0.01, limits=Limits(queue_requests=4)) as server:
        with open_request(server, "/v1/completions", {**LONG, "n": 3}):
            wait_for(lambda: len(server.client.running) == 3)
            refused = post(server, "/v1/completions", {"prompt": "a", "n": 2})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model=MODEL, prompt=["a"] * 5)


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_engine_is_an_http_status(slow: Running, stream: bool) -> None:
    slow.client.waiting_limit = 0
    for path, body in (("/v1/completions", {"prompt": ["a", "b"]}), ("/generate", {"text": "a"}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):  # fmt: skip
        answer = post(slow, path, {**body, "stream": stream})
        assert answer.status_code == 429 and "retry-after" in answer.headers, path
    assert slow.service.sequences == 0


@pytest.mark.parametrize(("finish", "status", "code"), [
    (Finish("error", message="logits are not finite", status=500), 500, "engine_error"),
    (Finish("timeout", message="too slow", status=408), 408, "timeout"),
])  # fmt: skip
def test_faults_of_one_request(slow: Running, finish: Finish, status: int, code: str) -> None:
    slow.client.faults["bad"] = finish
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/generate", {"text": "a"})):
        answer = post(slow, path, {**body, "rid": "bad"})
        assert answer.status_code == status and answer.json()["error"]["code"] == code
        events = post(slow, path, {**body, "rid": "bad", "stream": True})
        assert events.status_code == 200 and f'"code":"{code}"' in events.text
        assert events.text.endswith("data: [DONE]\n\n")
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.APIError, match=finish.message):
            for _ in client.completions.create(model=MODEL, prompt="a", stream=True, extra_body={"rid": "bad"}):
                pass


def test_a_request_whose_time_is_over_is_not_tried_again(slow: Running) -> None:
    slow.client.faults["late"] = Finish("timeout", message="too slow", status=408)
    before = len(slow.client.seen)
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="x", max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as late:
            client.completions.create(model=MODEL, prompt="a", extra_body={"rid": "late"})
    assert late.value.status_code == 408 and len(slow.client.seen) == before + 1


def test_timeout_reaches_the_engine() -> None:
    with running_server(request_timeout=5.0) as server:
        post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "timeout": 2, "rid": "short"})
        post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1, "timeout": 9, "rid": "long"})
        assert {r.rid: r.timeout for r in server.client.seen} == {"short": 2.0, "long": 5.0}


def test_loading() -> None:
    with running_server(attach=False) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/livez").status_code == 200
        unready = httpx.get(f"{server.url}/readyz")
        assert unready.status_code == 503 and unready.json()["problems"][0].startswith("loading")
        for path in ("/v1/models", "/get_model_info"):
            assert httpx.get(f"{server.url}{path}").status_code == 503
        answer = post(server, "/v1/completions", {"prompt": "a"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
        assert "loading" in answer.json()["error"]["message"]
        server.call(lambda: server.service.attach(make_engine(server.client)))
        assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert httpx.get(f"{server.url}/readyz").status_code == 200


def test_dead_engine(slow: Running) -> None:
    with open_request(slow, "/v1/completions", {**LONG, "stream": True}) as sock:
        wait_for(lambda: any(s.index > 1 for s in list(slow.client.running.values())))
        slow.call(slow.client.die)
        assert '"type":"service_unavailable"' in read_all_events(sock)
    unready = httpx.get(f"{slow.url}/readyz")
    assert unready.status_code == 503 and "engine" in unready.json()["problems"][0]
    assert httpx.get(f"{slow.url}/health").status_code == 200
    assert post(slow, "/v1/completions", {"prompt": "a"}).status_code == 503
    slow.call(slow.client.revive)
    assert post(slow, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert httpx.get(f"{slow.url}/readyz").status_code == 200


def test_stalled_engine_is_not_ready() -> None:
    with (
        running_server(step_seconds=0.005, stall_timeout=2.0) as server,
        open_request(server, "/v1/completions", {**LONG, "stream": True}),
    ):
        wait_for(lambda: any(s.index > 1 for s in list(server.client.running.values())))
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        server.client.frozen = True
        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
        problems = wait_for_problems(server)
        assert any(p.startswith(("stall", "heartbeat")) for p in problems)
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.client.frozen = False
        wait_for(lambda: httpx.get(f"{server.url}/readyz").status_code == 200)


def wait_for_problems(server: Running) -> list[str]:
    problems: list[str] = httpx.get(f"{server.url}/readyz").json()["problems"]
    return problems


def test_readyz_answers_at_once_under_load() -> None:
    with running_server(step_seconds=0.002) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        socks = [open_request(server, "/v1/completions", {**LONG, "stream": True}) for _ in range(20)]
        wait_for(lambda: len(server.client.running) == 20)
        with within(server, 30 * 0.05):
            for _ in range(30):
                assert client.get("/readyz").status_code == 200
        for sock in socks:
            sock.close()
        wait_for(lambda: not server.client.running)


def test_drain_lets_streams_finish(slow: Running) -> None:
    body = {"prompt": "hello", "max_tokens": 24, "stream": True}
    with open_request(slow, "/v1/completions", body) as sock:
        wait_for(lambda: len(slow.client.running) == 1)
        finished = threading.Event()
        slow.client.frozen = True  # so that it cannot be over too early

        def drain() -> None:
            slow.run(slow.service.drain(PATIENCE))
            finished.set()

        drainer = threading.Thread(target=drain)
        drainer.start()
        wait_for(lambda: slow.service.draining)
        refused = post(slow, "/v1/completions", {"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["connection"] == "close"
        assert httpx.get(f"{slow.url}/readyz").status_code == 503
        assert not finished.is_set()
        slow.client.frozen = False
        text = read_all_events(sock)
    pieces = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    ids = make_tokenizer().encode("hello", add_special=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected_text(ids, 24)
    drainer.join(PATIENCE)
    assert finished.is_set()


def test_drain_ends_streams_after_the_grace(slow: Running) -> None:
    with (
        open_request(slow, "/v1/completions", {**LONG, "stream": True}) as stream,
        open_request(
            slow, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        ) as single,
    ):
        wait_for(lambda: len(slow.client.running) == 2 and all(s.index for s in list(slow.client.running.values())))
        with within(slow, 2.0):
            slow.run(slow.service.drain(0.2))
        text = read_all_events(stream)
        assert '"type":"service_unavailable"' in text and "shut down" in text
        assert single.recv(65536).startswith(b"HTTP/1.1 503")


def test_client_that_stops_reading_is_dropped() -> None:
    limits = replace(Limits(), stream_stall_seconds=0.3)
    with running_server(step_seconds=0.0005, limits=limits) as server:
        body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 64, "logprobs": 20}
        with open_request(server, "/v1/completions", body) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            # Not for its running: on a busy machine that may begin and end between two looks.
            wait_for(lambda: len(server.client.aborted) > 0)
            wait_for(lambda: server.service.in_flight == 0 and not server.client.running)
