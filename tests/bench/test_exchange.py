"""Exchanges with servers that write byte for byte what a test says."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from bough.bench.exchange import Answer, exchange

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def asked(
    *pieces: bytes, body: bytes = b"", path: str = "/v1/x?a=1", timeout: float | None = None, hold: bool = False
) -> tuple[Answer, bytes]:
    """(answer, request) of a server that writes ``pieces`` and closes the connection, unless it is to ``hold`` it."""
    request = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal request
        request = await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(len(body))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if hold:
            await reader.read()
        writer.close()

    async def ask() -> Answer:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await exchange("POST", f"http://127.0.0.1:{port}{path}", {"X-Mine": "1"}, body, timeout)

    return uvloop.run(ask()), request


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))


def test_what_is_sent_and_what_comes_back() -> None:
    answer, request = asked(HEAD + b"Content-Length: 5\r\n\r\nhel", b"lo", body=b'{"a": 1}')
    assert answer.status == 200 and answer.body == b"hello"
    head, _, body = request.partition(b"\r\n\r\n")
    first, *headers = head.split(b"\r\n")
    assert first == b"POST /v1/x?a=1 HTTP/1.1" and body == b'{"a": 1}'
    assert {b"Content-Length: 8", b"Connection: close", b"X-Mine: 1"} < set(headers)


def test_the_path_of_a_bare_address() -> None:
    assert asked(HEAD + b"\r\n", path="")[1].startswith(b"POST / HTTP/1.1\r\n")


def test_an_answer_may_end_with_its_chunks_or_its_connection() -> None:
    chunked, _ = asked(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks(b"ab", b"c") + b"more")
    closed, _ = asked(HEAD + b"\r\nabc")
    followed, _ = asked(HEAD + b"Content-Length: 3\r\n\r\nabcHTTP/1.1 408 Too Late\r\nContent-Length: 1\r\n\r\nd")
    continued, _ = asked(b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"Content-Length: 3\r\n\r\nabc")
    assert [a.body for a in (chunked, closed, followed, continued)] == [b"abc"] * 4
    assert continued.status == followed.status == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HEAD,
        HEAD + b"Content-Length: 9\r\n\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n",
        b"what?\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    ],
)
def test_an_answer_that_is_not_complete(sent: bytes) -> None:
    with pytest.raises(ConnectionError, match="disconnected before|in HTTP"):
        asked(sent)


def test_a_server_that_falls_silent() -> None:
    with pytest.raises(TimeoutError, match="nothing for 0.05 s"):
        asked(HEAD, timeout=0.05, hold=True)


@pytest.mark.parametrize("url", ["localhost:80/v1", "", "http://", "ftp://x/", "http://x:port/", "http://x/a b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ValueError):
        uvloop.run(exchange("GET", url, {}))


def test_a_header_is_one_line() -> None:
    with pytest.raises(ValueError, match="head"):
        uvloop.run(exchange("GET", "http://x/", {"Authorization": "Bearer k\n"}))


@given(st.lists(st.binary(max_size=6).map(lambda b: b.replace(b"\x00", b"\n"))))
def test_a_line_has_the_time_of_its_end(pieces: list[bytes]) -> None:
    lines = Answer(200, [(piece, float(i)) for i, piece in enumerate(pieces)]).lines()
    body = b"".join(pieces)
    assert b"\n".join(line for line, _ in lines) == body.removesuffix(b"\n")
    ends = [i for i, piece in enumerate(pieces) for _ in range(piece.count(b"\n"))]
    assert [now for _, now in lines][: len(ends)] == ends
