"""Unix-domain ZeroMQ between the API process and the engine: msgpack of typed messages, nothing else.

The engine binds one ROUTER; each client connects a DEALER. Both live in a folder that only this user can
enter. What does not decode is counted and dropped.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import zmq

from bough.base.errors import ConfigError
from bough.base.messages import FromEngine, encode
from bough.engine.driver import Delivery, Peer, ToDriver
from bough.engine.launch import ENDPOINT, PATH_BYTES

RECEIVE_BATCH = 1024
"""Messages taken between two steps, so that a flood of them cannot keep the engine from stepping."""
MESSAGE_BYTES = 64 << 20
"""A larger message ends its connection."""
UNREAD_MESSAGES = 1 << 17
"""Messages (one per step and a few heartbeats a second) that a client may leave unread before it is given up."""
LINGER_MS = 500

_decode = msgspec.msgpack.Decoder(ToDriver).decode


def endpoint(run_dir: Path) -> str:
    """The address of the engine of ``run_dir``. Raises ConfigError where a socket cannot have it."""
    path = run_dir / ENDPOINT
    if len(os.fsencode(path)) > PATH_BYTES:
        raise ConfigError(f"the path of a socket may have {PATH_BYTES} bytes; this is longer: {path}")
    return f"ipc://{path}"


class RouterPort:
    """The engine's end: a :class:`bough.engine.driver.Port` over a ROUTER socket."""

    def __init__(self, run_dir: Path) -> None:
        self.bad_messages = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a dead client is an error, not a silence
        self._socket.setsockopt(zmq.SNDHWM, UNREAD_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.bind(endpoint(run_dir))

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        if timeout > 0:
            self._socket.poll(int(timeout * 1000) + 1)
        messages: list[tuple[Peer, ToDriver]] = []
        for _ in range(RECEIVE_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                peer, payload = frames
                messages.append((peer, _decode(payload)))
            except (ValueError, msgspec.MsgspecError):
                self.bad_messages += 1
        return messages

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        try:
            self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def close(self) -> None:
        self._socket.close()
        self._context.term()
