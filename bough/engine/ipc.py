"""The Unix socket between the API process and the engine: msgpack of typed messages, nothing else.

The engine listens in a folder that only this user can enter. A message on the wire is its length, four bytes, the
lowest first, and its msgpack. What does not decode is counted and dropped; what has no length that a message may have
ends its connection. Both ends write and read on their own threads: one that took this from them would have to be woken
for every token, on a core that computes.
"""

from __future__ import annotations

import itertools
import select
import socket
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from bough.base.errors import ConfigError
from bough.base.messages import FromEngine, encode
from bough.engine.driver import Delivery, Peer, ToDriver
from bough.engine.launch import ENDPOINT, PATH_BYTES

READ_BYTES = 1 << 18
"""What is read of one client between two steps, so that a flood of messages cannot keep the engine from stepping."""
MESSAGE_BYTES = 64 << 20
"""A larger message of a client ends its connection."""
UNREAD_BYTES = 1 << 28
"""What a client may leave unread before it is given up."""
LINGER_SECONDS = 0.5
BACKLOG = 64
_LENGTH = 4

_decode = msgspec.msgpack.Decoder(ToDriver).decode


def endpoint(run_dir: Path) -> str:
    """The address of the engine of ``run_dir``. Raises ConfigError where a socket cannot have it."""
    path = str(run_dir / ENDPOINT)
    if len(path.encode()) > PATH_BYTES:
        raise ConfigError(f"the path of a socket may have {PATH_BYTES} bytes; this is longer: {path}")
    return path


def connected(path: str) -> socket.socket:
    """A connection to whoever listens at ``path``. Raises OSError where it cannot be had at once."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Wire:
    """One end of a connection: whole messages through a stream socket, without ever waiting.

    Args:
        most: bytes of a message that arrives; a longer one ends the connection. None: any.

    Attributes:
        ended: nothing more can arrive, because the other end is gone or because it broke the rules.
        unsent: bytes that wait for the other end to read.
    """

    def __init__(self, connection: socket.socket, most: int | None = None) -> None:
        connection.setblocking(False)
        self.ended = False
        self.unsent = 0
        self._most = most
        self._socket = connection
        self._scratch = bytearray(READ_BYTES)
        self._received = bytearray()
        self._unsent: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    def read(self) -> list[bytes]:
        """The messages that are complete with what has arrived, of which at most ``READ_BYTES`` are taken."""
        try:
            n = self._socket.recv_into(self._scratch)
        except BlockingIOError:
            return []
        except OSError:
            n = 0
        self.ended = not n
        received = self._received
        received += memoryview(self._scratch)[:n]
        messages, at = [], 0
        while len(received) - at >= _LENGTH:
            begin = at + _LENGTH
            end = begin + int.from_bytes(received[at:begin], "little")
            if self._most is not None and end - begin > self._most:
                self.ended = True
                break
            if end > len(received):
                break
            messages.append(bytes(received[begin:end]))
            at = end
        del received[:at]
        return messages

    def write(self, payload: bytes) -> None:
        """Send ``payload``, or as much of it as the other end has room for; :meth:`flush` goes on."""
        self._unsent.append(memoryview(len(payload).to_bytes(_LENGTH, "little") + payload))
        self.unsent += _LENGTH + len(payload)
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the other end has room for it."""
        while self._unsent and not self.ended:
            message = self._unsent[0]
            try:
                n = self._socket.send(message)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            self.unsent -= n
            if n < len(message):
                self._unsent[0] = message[n:]
                return
            self._unsent.popleft()

    def close(self, linger: float = 0.0) -> None:
        """Close the connection; with ``linger``, wait for so many seconds at most until what waits is sent."""
        if linger and self._unsent and not self.ended:
            self._socket.settimeout(linger)
            with suppress(OSError):
                self._socket.sendall(b"".join(self._unsent))
        self._socket.close()


class SocketPort:
    """The engine's end: a :class:`bough.engine.driver.Port` over a listening socket."""

    def __init__(self, run_dir: Path) -> None:
        self.bad_messages = 0
        self._wires: dict[Peer, Wire] = {}
        self._peers: dict[int, Peer] = {}  # by descriptor
        self._crowded: set[Peer] = set()  # those with something that waits to be sent
        self._numbers = itertools.count(1)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        path = endpoint(run_dir)
        Path(path).unlink(missing_ok=True)  # an earlier engine's
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        messages: list[tuple[Peer, ToDriver]] = []
        for descriptor, events in self._epoll.poll(timeout):
            if descriptor == self._listener.fileno():
                self._accept()
                continue
            peer = self._peers[descriptor]
            wire = self._wires[peer]
            if events & select.EPOLLOUT:
                wire.flush()
            if events & ~select.EPOLLOUT:
                self._read(peer, wire, messages)
            self._follow(peer, wire)
        return messages

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        wire = self._wires.get(peer)
        if wire is None:
            return "gone"
        if wire.unsent >= UNREAD_BYTES:
            return "full"
        wire.write(encode(message))
        self._follow(peer, wire)
        return "gone" if wire.ended else "sent"

    def close(self) -> None:
        for wire in self._wires.values():
            wire.close(LINGER_SECONDS)
        self._listener.close()
        self._epoll.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it left while it waited
            return
        peer = b"%d" % next(self._numbers)
        self._wires[peer] = Wire(connection, MESSAGE_BYTES)
        self._peers[connection.fileno()] = peer
        self._epoll.register(connection, select.EPOLLIN)

    def _read(self, peer: Peer, wire: Wire, messages: list[tuple[Peer, ToDriver]]) -> None:
        for payload in wire.read():
            try:
                messages.append((peer, _decode(payload)))
            except (ValueError, msgspec.MsgspecError):
                self.bad_messages += 1

    def _follow(self, peer: Peer, wire: Wire) -> None:
        """Wait for room where something waits to be sent; forget who is gone."""
        descriptor = wire.fileno()
        if wire.ended:
            self._crowded.discard(peer)
            del self._wires[peer], self._peers[descriptor]
            self._epoll.unregister(descriptor)
            wire.close()
        elif bool(wire.unsent) != (peer in self._crowded):
            if wire.unsent:
                self._crowded.add(peer)
                self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
            else:
                self._crowded.discard(peer)
                self._epoll.modify(descriptor, select.EPOLLIN)
