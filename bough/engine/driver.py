"""The loop of an engine: requests in, steps, outputs out. The same for every transport."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Literal, Protocol

import msgspec

from bough.base.errors import BoughError
from bough.base.messages import (
    Abort,
    Control,
    ControlReply,
    Finish,
    FromEngine,
    Hello,
    Output,
    Outputs,
    Request,
    Stats,
    ToEngine,
)

logger = logging.getLogger("bough.engine")

HEARTBEAT_SECONDS = 0.25
"""Pause between two heartbeats; also the longest wait of an idle loop, so a stop is seen within it."""
STALLED_SECONDS = 0.001
"""Pause of a loop whose requests all wait for something outside, such as a compile."""
FINISH_STEPS = 64
"""Steps that a stopping engine gives the requests that it aborts to leave its pipeline."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """A client introduces itself; answered with Hello and a heartbeat."""


ToDriver = ToEngine | Attach
Peer = bytes
Delivery = Literal["sent", "full", "gone"]


class SchedulerLoop(Protocol):
    """The scheduler as its driver sees it."""

    @property
    def idle(self) -> bool: ...
    @property
    def stalled(self) -> bool: ...
    @property
    def outbox(self) -> list[FromEngine]: ...
    def receive(self, message: ToEngine) -> None: ...
    def patience(self) -> float: ...
    def step(self) -> None: ...
    def stats(self) -> Stats: ...
    def check(self) -> None: ...


class Core(Protocol):
    """A built engine: what :func:`bough.engine.build.build` returns, as far as running it goes."""

    @property
    def hello(self) -> Hello: ...
    @property
    def scheduler(self) -> SchedulerLoop: ...
    def prepare(self) -> bool:
        """Do a little of what is better done while nobody waits; whether there was any."""
        ...

    def keep_up(self) -> None:
        """Between two steps, as much of it as the last one has used up."""
        ...

    def close(self) -> None: ...


class Port(Protocol):
    """The engine's end of a transport. A peer is one client; its name is never used again after it is gone."""

    bad_messages: int

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        """What has arrived, oldest first; waits at most ``timeout`` seconds for the first. Never raises."""
        ...

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        """Send without waiting: ``full`` when the peer has stopped reading, ``gone`` when it is dead."""
        ...

    def close(self) -> None: ...


def _ends(message: FromEngine) -> bool:
    """``message`` has somebody's last word."""
    if isinstance(message, Outputs):
        return any(output.finish is not None for output in message.items)
    return isinstance(message, ControlReply)


class Driver:
    """Runs a core behind a port in the calling thread until it is stopped.

    A peer is known from its first message, which is answered with Hello. A peer that dies, or that stops
    reading, has its requests aborted; one that comes back to reading is greeted with Hello again.
    """

    def __init__(self, core: Core, port: Port) -> None:
        self.core = core
        self.scheduler = core.scheduler
        self.port = port
        self._peers: dict[Peer, bool] = {}  # whether it reads what it is sent
        self._owners: dict[str, Peer] = {}  # requests in flight
        self._controls: dict[int, tuple[Peer, int]] = {}
        self._control_ids = itertools.count(1)
        self._next_beat = 0.0
        self._stopping = False
        self._unchecked = False  # since the last step
        self._unreported = False  # since the last step or message

    def stop(self) -> None:
        """Leave the loop soon. Safe in a signal handler and from another thread."""
        self._stopping = True

    def run(self) -> None:
        """Serve until stopped, then abort what is in flight. An error of a whole step leaves the loop."""
        try:
            while not self._stopping:
                self.turn()
            self._abort(list(self._owners))
            self.scheduler.receive(Control(0, "abort_all"))  # what runs for no peer stops, too
            for _ in range(FINISH_STEPS):
                if self.scheduler.idle:
                    break
                self.scheduler.step()
            self._flush()
        finally:
            self.port.close()

    def turn(self) -> None:
        """Once around the loop: what has arrived or is worth a wait, one step if there is work, what is to be sent."""
        wait = 0.0
        if self.scheduler.idle:
            # Who waits for the start in another process is greeted first: what is prepared may hold Python's lock.
            prepared = bool(self._peers) and self.core.prepare()
            wait = 0.0 if prepared else max(0.0, self._next_beat - time.monotonic())
        elif self.scheduler.stalled:
            wait = STALLED_SECONDS
        self._take(wait)
        while not self._stopping and (wait := self.scheduler.patience()):
            self._take(wait)
        if not self.scheduler.idle:
            self.scheduler.step()
            self._unchecked = self._unreported = True
        # Reported first: whoever asks after an answer sees the counters that it has led to.
        if self._unreported and (self.scheduler.idle or any(map(_ends, self.scheduler.outbox))):
            self._report()
        self._flush()
        self.core.keep_up()
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _take(self, wait: float) -> None:
        for peer, message in self.port.receive(wait):
            self._deliver(peer, message)

    def _deliver(self, peer: Peer, message: ToDriver) -> None:
        if peer not in self._peers:
            self._peers[peer] = True
            self._send(peer, self.core.hello)
        if not self._peers.get(peer, False):
            return  # dead, or yet to be greeted again, upon which it forgets what it has sent until then
        if isinstance(message, Attach):
            self._next_beat = 0.0
            return
        self._unreported = True
        if isinstance(message, Request):
            if message.rid in self._owners:  # not to be routed by its id, which is another's
                finish = Finish("error", message=f"a request with id {message.rid!r} is in flight", status=400)
                self._send(peer, Outputs([Output(message.rid, 0, [], len(message.ids) // 4, 0, finish)]))
                return
            self._owners[message.rid] = peer
        elif isinstance(message, Control):
            number = next(self._control_ids)
            self._controls[number] = (peer, message.id)
            message = msgspec.structs.replace(message, id=number)
        try:
            self.scheduler.receive(message)
        except Exception as error:
            self._refuse(message, error)

    def _refuse(self, message: ToEngine, error: Exception) -> None:
        """The scheduler could not take one message; nothing else is touched."""
        text, status = "the engine failed to take the request", 500
        if isinstance(error, BoughError):
            text, status = error.message, error.status
        else:
            logger.error("a message of kind %s failed", type(message).__name__, exc_info=error)
        if isinstance(message, Request):
            finish = Finish("error", message=text, status=status)
            self._route(Outputs([Output(message.rid, 0, [], len(message.ids) // 4, 0, finish)]))
            self._abort([message.rid])
        elif isinstance(message, Control):
            self._route(ControlReply(message.id, False, text, {"status": status}))

    def _flush(self) -> None:
        messages = list(self.scheduler.outbox)
        self.scheduler.outbox.clear()
        for message in messages:
            self._route(message)

    def _route(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            shares: dict[Peer, list[Output]] = {}
            for output in message.items:
                owner = self._owners.get(output.rid)
                if owner is not None:
                    shares.setdefault(owner, []).append(output)
                    if output.finish is not None:
                        del self._owners[output.rid]
            for peer, items in shares.items():
                self._send(peer, Outputs(items))
        elif isinstance(message, ControlReply):
            peer, number = self._controls.pop(message.id, (b"", 0))
            if peer in self._peers:
                self._send(peer, msgspec.structs.replace(message, id=number))
        else:
            for peer in list(self._peers):
                self._send(peer, message)

    def _send(self, peer: Peer, message: FromEngine) -> None:
        if not self._peers.get(peer, False):
            return
        delivery = self.port.send(peer, message)
        if delivery == "sent":
            return
        if delivery == "gone":
            del self._peers[peer]
        else:
            self._peers[peer] = False
        lost = [rid for rid, owner in self._owners.items() if owner == peer]
        if lost:
            logger.warning("a client is %s; its %d requests are aborted", delivery, len(lost))
        for rid in lost:
            del self._owners[rid]
        self._abort(lost)

    def _abort(self, rids: list[str]) -> None:
        if not rids:
            return
        try:
            self.scheduler.receive(Abort(rids))
        except Exception as error:
            logger.error("an abort failed", exc_info=error)

    def _beat(self) -> None:
        for peer, reads in list(self._peers.items()):
            if not reads:
                delivery = self.port.send(peer, self.core.hello)
                if delivery == "sent":
                    self._peers[peer] = True
                elif delivery == "gone":
                    del self._peers[peer]
        self._report()
        if self._unchecked and self.scheduler.idle:
            self._unchecked = False
            try:
                self.scheduler.check()
            except Exception as error:
                logger.error("an invariant does not hold", exc_info=error)
        self._next_beat = time.monotonic() + HEARTBEAT_SECONDS

    def _report(self) -> None:
        stats = self.scheduler.stats()
        self._route(msgspec.structs.replace(stats, bad_messages=stats.bad_messages + self.port.bad_messages))
        self._unreported = False
