"""A client of an engine in another process, over :mod:`bough.engine.ipc`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from bough.base.errors import EngineError
from bough.base.messages import Hello, decode_from_engine, encode
from bough.engine.client import StreamClient
from bough.engine.driver import Attach, ToDriver
from bough.engine.ipc import Wire, connected, endpoint

logger = logging.getLogger("bough.client")

ASK_SECONDS = 0.02
"""Pause between two attempts to reach an engine that is starting."""


class IpcClient(StreamClient):
    """Follows the engine of a run folder through its deaths and restarts.

    The connection ends with the engine. Whatever was in flight ends with an error then, what was not sent yet is thrown
    away, and the client waits for the next engine's Hello. Messages are queued for a live connection only, so none
    waits for an engine that does not exist.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.bad_messages = 0
        self._endpoint = endpoint(run_dir)
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._crowded = False  # something waits to be sent

    async def start(self) -> Hello:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        return await self._wait_for_hello()

    async def close(self) -> None:
        self._give_up(EngineError("the client is closed"))
        self._disconnect()

    async def _connect(self) -> None:
        """Introduce this client to the engine as soon as it listens."""
        while True:
            try:
                connection = connected(self._endpoint)
                break
            except OSError:  # nobody listens yet, or there is no descriptor left now
                await asyncio.sleep(ASK_SECONDS)
        self._wire = Wire(connection)
        asyncio.get_running_loop().add_reader(connection.fileno(), self._receive, self._wire)
        self._post(Attach())

    def _disconnect(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._wire is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._wire.fileno())
            loop.remove_writer(self._wire.fileno())
            self._wire.close()
            self._wire, self._crowded = None, False

    def _post(self, message: ToDriver) -> bool:
        wire = self._wire
        if wire is None or wire.ended:
            return False
        wire.write(encode(message))
        if wire.unsent and not self._crowded:
            self._crowded = True
            asyncio.get_running_loop().add_writer(wire.fileno(), self._flush, wire)
        return not wire.ended

    def _flush(self, wire: Wire) -> None:
        wire.flush()
        if not wire.unsent or wire.ended:
            self._crowded = False
            asyncio.get_running_loop().remove_writer(wire.fileno())

    def _receive(self, wire: Wire) -> None:
        """Handle what has arrived. What the engine sent before it died counts; what it did not, never comes."""
        for payload in wire.read():
            self._handle(payload)
        if wire.ended and self._wire is wire:
            self._on_death()

    def _handle(self, payload: bytes) -> None:
        try:
            message = decode_from_engine(payload)
        except (ValueError, msgspec.MsgspecError):
            self.bad_messages += 1
            return
        self._dispatch(message)

    def _on_death(self) -> None:
        if self.alive:
            logger.warning("the engine died; %d sequences in flight end with an error", len(self._streams))
        self._lose("the engine died")
        self._disconnect()
        self._connecting = asyncio.create_task(self._connect())
