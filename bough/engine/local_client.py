"""A client of an engine that runs in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable

from bough.base.errors import EngineError
from bough.base.messages import FromEngine, Hello
from bough.engine.client import StreamClient
from bough.engine.driver import Attach, Core, Delivery, Driver, Peer, ToDriver

logger = logging.getLogger("bough.engine")

HERE: Peer = b"here"


class ThreadPort:
    """A :class:`bough.engine.driver.Port` between two threads of one process; its only peer is ``HERE``.

    ``deliver`` is called on the engine's thread with what one turn of the loop has sent.
    """

    def __init__(self, deliver: Callable[[list[FromEngine]], None]) -> None:
        self.bad_messages = 0
        self._deliver = deliver
        self._inbox: deque[ToDriver] = deque()
        self._arrival = threading.Condition()
        self._unsent: list[FromEngine] = []

    def put(self, message: ToDriver) -> None:
        with self._arrival:
            self._inbox.append(message)
            self._arrival.notify()

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        self._hand_over()
        with self._arrival:
            if timeout > 0 and not self._inbox:
                self._arrival.wait(timeout)
            messages = [(HERE, message) for message in self._inbox]
            self._inbox.clear()
        return messages

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        self._unsent.append(message)
        return "sent"

    def close(self) -> None:
        self._hand_over()

    def _hand_over(self) -> None:
        if self._unsent:
            self._deliver(self._unsent)
            self._unsent = []


class LocalClient(StreamClient):
    """Builds a core with ``build`` and drives it, both on a thread of its own."""

    def __init__(self, build: Callable[[], Core]) -> None:
        super().__init__()
        self.core: Core | None = None
        self._build = build
        self._driver: Driver | None = None
        self._port = ThreadPort(self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._ended = asyncio.Event()

    async def start(self) -> Hello:
        """Build the engine and wait for it; raises what its building raised."""
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._port.put(Attach())
            self._thread = threading.Thread(target=self._run, name="bough-engine", daemon=True)
            self._thread.start()
        return await self._wait_for_hello()

    async def close(self) -> None:
        self._closing = True
        if self._driver is not None:
            self._driver.stop()
        if self._thread is not None:
            self._port.put(Attach())  # wakes the loop
            await self._ended.wait()
            self._thread.join()  # it has said goodbye; no other thread, which may be impossible when Python exits

    def _post(self, message: ToDriver) -> bool:
        self._port.put(message)
        return True

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            self.core = self._build()
            try:
                self._driver = Driver(self.core, self._port)
                if self._closing:
                    self._driver.stop()
                self._driver.run()
            finally:
                self.core.close()
        except Exception as error:
            failure = error
            if self._driver is not None:
                logger.error("the engine failed", exc_info=error)
        self._on_loop(lambda: self._on_end(failure))

    def _on_end(self, failure: Exception | None) -> None:
        self._give_up(failure or EngineError("the engine has stopped"))
        self._ended.set()

    def _deliver(self, messages: list[FromEngine]) -> None:
        self._on_loop(lambda: self._dispatch_all(messages))

    def _dispatch_all(self, messages: list[FromEngine]) -> None:
        for message in messages:
            self._dispatch(message)

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        # A loop that is closed has no consumer left; the thread is a daemon and ends with the process.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)
