"""Adapters: which are known, where they are held, and who waits for one.

A request that names an adapter waits at this gate, and nobody else does. Whoever passed keeps the adapter until it
ends: it is never computed with another version. When all places are taken, the adapter that was asked for least
recently leaves: at once if nobody uses it, else as soon as those who use it have ended; new requests for it line up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from bough.base.errors import BoughError, InvalidRequest, NotFound, Unavailable
from bough.base.messages import ControlReply
from bough.base.plan import NO_ADAPTER, AdapterDevice, AdapterLoad
from bough.base.validate import check_adapter_name
from bough.scheduler.gates import GateState
from bough.scheduler.req import Req, Status


class State(Enum):
    KNOWN = "known"
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Entry:
    """One adapter.

    Attributes:
        path: its folder.
        pinned: never leaves by itself.
        listed: it was loaded by an operator, or by a request that has found it.
        place: where it is held, or is being loaded to.
        version: digest of its contents, once it is loaded: part of the namespace of its KV.
        asked: when it was last asked for, as a count.
    """

    name: str
    path: str
    pinned: bool = False
    listed: bool = False
    state: State = State.KNOWN
    place: int = NO_ADAPTER
    version: str = ""
    asked: int = 0
    load: AdapterLoad | None = None
    users: dict[int, Req] = field(default_factory=dict)

    def sweep(self) -> None:
        """Forget the users that have ended."""
        self.users = {order: req for order, req in self.users.items() if req.status is not Status.FINISHED}


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, or an operator's command, that waits for an adapter; ``error`` is why it waits in vain."""

    entry: Entry
    req: Req | None = None
    control: int = 0
    error: BoughError | None = None


class Adapters:
    """A Gate, and what operators may do with adapters. ``device`` is None where adapters are not served."""

    def __init__(self, device: AdapterDevice | None) -> None:
        self._device = device
        self._known: dict[str, Entry] = {}
        self._places: list[Entry | None] = [None] * (device.places if device else 0)
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._clock = itertools.count(1)
        self._tickets: dict[int, int] = {}  # of requests, by their order
        self.replies: list[ControlReply] = []
        """Answers to commands that took their time; the scheduler sends them."""

    @property
    def busy(self) -> bool:
        """A command of an operator is under way."""
        return any(waiting.control for waiting in self._waiting.values())

    # -- the gate

    def start(self, req: Req) -> None:
        """Line ``req`` up for its adapter; raises NotFound or InvalidRequest for one that there cannot be."""
        name = req.request.namespace.adapter
        if not name:
            return
        check_adapter_name(name)
        entry = self._known.get(name) or Entry(name, name)
        self._tickets[req.order] = self._line_up(_Waiting(entry, req))
        self._known[name] = entry
        self.advance()

    def poll(self, req: Req) -> GateState:
        """READY once the request has its adapter; raises why it cannot have it."""
        ticket = self._tickets.get(req.order)
        if ticket is None:
            return GateState.READY
        waiting = self._waiting.get(ticket)
        if waiting is None:
            del self._tickets[req.order]
            return GateState.READY
        if waiting.error is not None:
            raise waiting.error
        return GateState.PENDING

    def cancel(self, req: Req) -> None:
        ticket = self._tickets.pop(req.order, None)
        if ticket is not None:
            self._waiting.pop(ticket, None)
        if req.adapter != NO_ADAPTER:
            entry = self._places[req.adapter]
            if entry is not None:
                entry.users.pop(req.order, None)

    def ready(self, name: str) -> tuple[int, str] | None:
        """(place, name@version) of an adapter that is there and stays; nobody's turn changes by the question."""
        entry = self._known.get(name)
        return None if entry is None or entry.state is not State.READY else (entry.place, f"{name}@{entry.version}")

    # -- operators

    def load(self, control: int, name: str, path: str, pinned: bool) -> None:
        """Make an adapter known and load it; the reply comes when it is there. Raises as :meth:`start` does."""
        check_adapter_name(name)
        known = self._known.get(name)
        if known is not None and known.listed:
            raise InvalidRequest(f"the adapter {name!r} is loaded already; unload it first", param="lora_name")
        self._known[name] = entry = Entry(name, path or name, pinned, listed=True)
        if known is not None:
            self._dismiss(known)
        self._line_up(_Waiting(entry, control=control))
        self.advance()

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that have it go on, and its place is free when they have ended."""
        entry = self._known.get(name)
        if entry is None or not entry.listed:
            raise NotFound(f"there is no adapter {name!r}", param="lora_name")
        del self._known[name]
        self._dismiss(entry)

    def names(self) -> dict[str, str]:
        """Names and folders of the adapters that were loaded and not unloaded since."""
        return {entry.name: entry.path for entry in self._known.values() if entry.listed}

    # -- who gets what

    def advance(self) -> None:
        """Take in what was loaded, hand adapters out, and make room for those that are waited for."""
        if self._device is None:
            return
        while True:
            for entry in self._places:
                if entry is not None and entry.load is not None and entry.load.done():
                    self._loaded(entry)
            self._free_left()
            for ticket, waiting in list(self._waiting.items()):
                if waiting.error is None and waiting.entry.state is State.READY:
                    self._grant(ticket, waiting)
            wanted = next(self._wanted(), None)
            place = None if wanted is None else self._room()
            if wanted is None or place is None:
                return
            self._begin(wanted, place)

    def _line_up(self, waiting: _Waiting) -> int:
        if self._device is None:
            raise NotFound(
                f"the model {waiting.entry.name!r} does not exist; adapters are not served: start with --lora-dir",
                param="model",
            )
        waiting.entry.asked = next(self._clock)
        ticket = next(self._numbers)
        self._waiting[ticket] = waiting
        return ticket

    def _grant(self, ticket: int, waiting: _Waiting) -> None:
        del self._waiting[ticket]
        entry, req = waiting.entry, waiting.req
        if req is None:
            self.replies.append(ControlReply(waiting.control, True, f"the adapter {entry.name!r} is loaded"))
            return
        entry.users[req.order] = req
        req.adapter = entry.place
        namespace = msgspec.structs.replace(req.request.namespace, adapter=f"{entry.name}@{entry.version}")
        req.request = msgspec.structs.replace(req.request, namespace=namespace)

    def _loaded(self, entry: Entry) -> None:
        assert entry.load is not None
        try:
            entry.version = str(entry.load.result())
            entry.listed = True
            entry.state = State.LEAVING if entry.state is State.LEAVING else State.READY
        except BoughError as error:
            self._fail(entry, error)
        except Exception as error:
            self._fail(entry, BoughError(f"the adapter {entry.name!r} could not be loaded: {type(error).__name__}"))
        entry.load = None

    def _fail(self, entry: Entry, error: BoughError) -> None:
        self._vacate(entry)
        if self._known.get(entry.name) is entry:
            del self._known[entry.name]
        for ticket, waiting in list(self._waiting.items()):
            if waiting.entry is not entry:
                continue
            waiting.error = error
            if waiting.req is None:
                del self._waiting[ticket]
                info: dict[str, str | int | float | bool | None] = {"status": error.status}
                self.replies.append(ControlReply(waiting.control, False, error.message, info))

    def _wanted(self) -> Iterator[Entry]:
        """Adapters that are waited for and have no place, the longest awaited first."""
        yield from dict.fromkeys(
            waiting.entry
            for waiting in self._waiting.values()
            if waiting.error is None and waiting.entry.state is State.KNOWN
        )

    def _room(self) -> int | None:
        """A free place, if need be of an adapter that nobody uses; None until one that has to leave is gone."""
        if None in self._places:
            return self._places.index(None)
        held = [entry for entry in self._places if entry is not None]
        if all(entry.pinned and entry.state is not State.LEAVING for entry in held):
            self._refuse_all()
        candidates = [entry for entry in held if entry.state is State.READY and not entry.pinned]
        for entry in candidates:
            entry.sweep()
        if not candidates:
            return None
        entry = min(candidates, key=lambda e: (bool(e.users), e.asked))
        if entry.users:
            if not any(other.state is State.LEAVING for other in held):
                entry.state = State.LEAVING
            return None
        place = entry.place
        self._vacate(entry)
        return place

    def _refuse_all(self) -> None:
        error = Unavailable(f"all {len(self._places)} places are taken by pinned adapters")
        for entry in list(self._wanted()):
            self._fail(entry, error)

    def _begin(self, entry: Entry, place: int) -> None:
        assert self._device is not None
        entry.place, entry.state = place, State.LOADING
        self._places[place] = entry
        entry.load = self._device.load(place, entry.name, entry.path)

    def _dismiss(self, entry: Entry) -> None:
        """Let ``entry``, which nobody can ask for any more, leave; whoever waits for it gets the one of its name."""
        for waiting in self._waiting.values():
            if waiting.entry is entry:
                if entry.name not in self._known:
                    self._known[entry.name] = Entry(entry.name, entry.name)
                waiting.entry = self._known[entry.name]
        if entry.place != NO_ADAPTER:
            entry.state = State.LEAVING
            self._free_left()

    def _free_left(self) -> None:
        for entry in self._places:
            if entry is not None and entry.state is State.LEAVING and entry.load is None:
                entry.sweep()
                if not entry.users:
                    self._vacate(entry)

    def _vacate(self, entry: Entry) -> None:
        assert self._device is not None
        if entry.place != NO_ADAPTER:
            self._device.clear(entry.place)
            self._places[entry.place] = None
        entry.place, entry.state = NO_ADAPTER, State.KNOWN

    def check(self) -> None:
        """Assert that every user's place holds its adapter and version, and that pinned adapters stay."""
        pinned = [entry for entry in self._known.values() if entry.pinned and entry.version]
        assert all(entry.state is State.READY for entry in pinned)
        for place, entry in enumerate(self._places):
            if entry is None:
                continue
            assert entry.place == place and entry.state is not State.KNOWN
            assert (entry.load is not None) >= (entry.state is State.LOADING)
            for req in entry.users.values():
                named = f"{entry.name}@{entry.version}"
                assert req.adapter == place and req.request.namespace.adapter == named
