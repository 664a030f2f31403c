"""A client of an engine in another process, over :mod:`bough.engine.ipc`."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import msgspec
import zmq

from bough.base.errors import EngineError
from bough.base.messages import Hello, decode_from_engine, encode
from bough.engine.client import StreamClient
from bough.engine.driver import Attach, ToDriver
from bough.engine.ipc import endpoint

logger = logging.getLogger("bough.client")

ASK_SECONDS = 0.05
"""Pause between two attempts to be greeted by an engine that is starting."""
RECEIVE_BATCH = 256
"""Messages handled before the event loop gets its turn."""


class IpcClient(StreamClient):
    """Follows the engine of a run folder through its deaths and restarts.

    The engine's Hello names its process; from then on a pidfd tells of its death at once. Whatever was in
    flight ends with an error, the connection and all that it still held is thrown away, and the client
    waits for the next engine's Hello. Messages are queued for a live connection only, so none waits for an
    engine that does not exist.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.bad_messages = 0
        self._endpoint = endpoint(run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._socket_fd = -1
        self._pidfd = -1
        self._asking: asyncio.Task[None] | None = None

    async def start(self) -> Hello:
        if self._asking is None:
            self._connect()
        return await self._wait_for_hello()

    async def close(self) -> None:
        self._give_up(EngineError("the client is closed"))
        self._disconnect()
        self._context.term()

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, int(ASK_SECONDS * 1000))
        self._socket.connect(self._endpoint)
        self._socket_fd = self._socket.FD
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket_fd, self._receive)
        self._asking = loop.create_task(self._ask())

    def _disconnect(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket_fd)
            self._socket.close()
            self._socket = None

    async def _ask(self) -> None:
        while not self._settled.is_set():
            self._post(Attach())
            await asyncio.sleep(ASK_SECONDS)

    def _post(self, message: ToDriver) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Sending can swallow the edge on the descriptor that announces what has arrived meanwhile.
        asyncio.get_running_loop().call_soon(self._receive)
        return True

    def _receive(self) -> None:
        """Handle what has arrived. The descriptor is edge-triggered: reading goes on until there is nothing."""
        for _ in range(RECEIVE_BATCH):
            if self._socket is None:
                return
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(payload)
        asyncio.get_running_loop().call_soon(self._receive)

    def _handle(self, payload: bytes) -> None:
        try:
            message = decode_from_engine(payload)
        except (ValueError, msgspec.MsgspecError):
            self.bad_messages += 1
            return
        if isinstance(message, Hello):
            self._watch(message.pid)
        self._dispatch(message)

    def _watch(self, pid: int) -> None:
        if self._pidfd >= 0:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            asyncio.get_running_loop().call_soon(self._on_death)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_death)

    def _on_death(self) -> None:
        # What the engine sent before it died counts; what it did not, never comes.
        while self._socket is not None and self._socket.poll(0):
            self._handle(self._socket.recv(zmq.NOBLOCK))
        logger.warning("the engine died; %d requests in flight end with an error", len(self._streams))
        self._lose("the engine died")
        self._disconnect()
        self._connect()
