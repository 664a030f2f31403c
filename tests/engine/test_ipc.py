"""Whole messages through a stream of bytes, however it is cut, and clients that do not read it or break its rules."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.base.messages import Abort, ControlReply, decode_from_engine, encode
from bough.engine import ipc
from bough.engine.driver import Attach
from bough.engine.ipc import MESSAGE_BYTES, SocketPort, Wire, endpoint
from bough.engine.launch import make_run_dir


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = make_run_dir()
    yield folder
    shutil.rmtree(folder)


def connected(run_dir: Path, port: SocketPort) -> Wire:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(endpoint(run_dir))
    port.receive(1.0)
    return Wire(connection)


@given(st.lists(st.integers(0, 19), max_size=10), st.lists(st.booleans(), max_size=20))
def test_messages_arrive_whole_and_in_order(sizes: list[int], pauses: list[bool]) -> None:
    ends = socket.socketpair()
    left, right = map(Wire, ends)
    messages = [bytes([i]) * ((1 << size) - 1) for i, size in enumerate(sizes)]
    waiting, got = list(messages), []
    with ends[0], ends[1]:
        while len(got) < len(messages):
            if waiting and not (pauses and pauses.pop()):
                left.write(waiting.pop(0))
            left.flush()
            got += right.read()
        assert got == messages and not left.unsent and not right.ended
        left.close()
        assert right.read() == [] and right.ended


def test_what_was_sent_before_the_end_is_read(run_dir: Path) -> None:
    port = SocketPort(run_dir)
    client = connected(run_dir, port)
    client.write(encode(Attach()))
    ((peer, message),) = port.receive(1.0)
    assert message == Attach()
    for i in range(3000):
        assert port.send(peer, ControlReply(i, True, "x" * 1000)) == "sent"
    got: list[int] = []
    while len(got) < 3000:
        for payload in client.read():
            reply = decode_from_engine(payload)
            assert isinstance(reply, ControlReply)
            got.append(reply.id)
        port.receive(0.0)
    assert got == list(range(3000))
    client.write(encode(Abort(["a"])))
    client.close()
    assert port.receive(1.0) == [(peer, Abort(["a"]))]
    port.receive(1.0)
    assert port.send(peer, ControlReply(0, True)) == "gone"
    port.close()


def test_a_client_that_does_not_read_is_full_until_it_does(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "UNREAD_BYTES", 50_000)
    port = SocketPort(run_dir)
    client = connected(run_dir, port)
    client.write(encode(Attach()))
    ((peer, _),) = port.receive(1.0)
    sent = 0
    while port.send(peer, ControlReply(sent, True, "x" * 1000)) == "sent":
        sent += 1
    assert sent > 50 and port.receive(0.0) == []
    got = 0
    while got < sent:
        got += len(client.read())
        port.receive(0.0)
    assert port.send(peer, ControlReply(sent, True)) == "sent"
    client.close()
    port.close()


def test_a_length_that_no_message_has_ends_the_connection(run_dir: Path) -> None:
    port = SocketPort(run_dir)
    bad, good = connected(run_dir, port), connected(run_dir, port)
    with socket.socket(fileno=bad.fileno()) as raw:
        raw.send((MESSAGE_BYTES + 1).to_bytes(4, "little"))
        assert port.receive(1.0) == []
        raw.setblocking(True)
        assert raw.recv(1) == b""
        raw.detach()
    good.write(encode(Attach()))
    assert [message for _, message in port.receive(1.0)] == [Attach()]
    for wire in (bad, good):
        wire.close()
    port.close()
