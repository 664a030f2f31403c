"""Who has which place among the adapters, against a model that keeps everything in lists and looks through them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bough.base.messages import Namespace, Request
from bough.base.params import SamplingParams
from bough.scheduler.adapters import Adapters
from bough.scheduler.gates import GateState
from bough.scheduler.req import EMPTY, Req, Status

NAMES = "abcde"


@dataclass
class Load:
    """One that is done when the test says so."""

    finished: bool = False

    def done(self) -> bool:
        return self.finished

    def result(self) -> str:
        return "1"


@dataclass
class Device:
    """:class:`bough.base.plan.AdapterDevice`."""

    places: int
    held: dict[int, str] = field(default_factory=dict)
    loads: dict[str, Load] = field(default_factory=dict)

    def load(self, place: int, name: str, path: str) -> Load:
        assert place not in self.held
        self.held[place] = name
        self.loads[name] = Load()
        return self.loads[name]

    def clear(self, place: int) -> None:
        del self.held[place]


@dataclass
class Model:
    """What the places should hold. ``asked`` lists names, the last one asked for last; ``leaving`` is the one that
    makes room as soon as its users have ended."""

    places: int
    pinned: set[str] = field(default_factory=set)
    held: dict[int, str] = field(default_factory=dict)
    ready: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    users: dict[int, str] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    leaving: str = ""

    def ask(self, order: int, name: str) -> None:
        self.asked = [*(other for other in self.asked if other != name), name]
        self.waiting[order] = name
        self.settle()

    def settle(self) -> None:
        while True:
            if self.leaving and self.leaving not in self.users.values():
                self.drop(self.leaving)
                self.leaving = ""
            for order, name in list(self.waiting.items()):
                if name in self.ready and name != self.leaving:
                    self.users[order] = self.waiting.pop(order)
            wanted = [name for name in self.waiting.values() if name not in self.held.values()]
            if not wanted or not self.makes_room():
                return
            self.held[min(set(range(self.places)) - set(self.held))] = wanted[0]

    def makes_room(self) -> bool:
        if len(self.held) < self.places:
            return True
        may_go = [name for name in self.asked if name in self.ready - self.pinned and name != self.leaving]
        unused = [name for name in may_go if name not in self.users.values()]
        if unused:
            self.drop(unused[0])
        elif may_go and not self.leaving:
            self.leaving = may_go[0]
        return bool(unused)

    def drop(self, name: str) -> None:
        self.held = {place: other for place, other in self.held.items() if other != name}
        self.ready.discard(name)


class AdapterPlaces(RuleBasedStateMachine):
    """Requests come and end, loads finish when they like; at most one of the places is pinned."""

    @initialize(places=st.integers(2, 4), pinned=st.booleans())
    def make(self, places: int, pinned: bool) -> None:
        self.device, self.model = Device(places), Model(places)
        self.adapters = Adapters(self.device)
        self.reqs: dict[int, Req] = {}
        self.n = 0
        if pinned:
            self.adapters.load(1, "p", "", True)
            self.model.pinned.add("p")
            self.model.ask(-1, "p")
            self.finish("p")
            del self.model.users[-1]

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        self.n += 1
        request = Request(rid=str(self.n), ids=b"", params=SamplingParams(), namespace=Namespace(adapter=name))
        req = self.reqs[self.n] = Req(request, self.n, 0.0, 0.0, 0, 1, None, EMPTY, 0)
        self.adapters.start(req)
        self.model.ask(self.n, name)

    @rule(data=st.data())
    def load_ends(self, data: st.DataObject) -> None:
        loading = [name for name, load in self.device.loads.items() if not load.finished]
        if loading:
            self.finish(data.draw(st.sampled_from(loading)))

    def finish(self, name: str) -> None:
        self.device.loads[name].finished = True
        self.model.ready.add(name)
        self.adapters.advance()
        self.model.settle()

    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        if not self.reqs:
            return
        order = data.draw(st.sampled_from(sorted(self.reqs)))
        req = self.reqs.pop(order)
        self.adapters.cancel(req)
        req.status = Status.FINISHED
        self.adapters.advance()
        self.model.users.pop(order, None)
        self.model.waiting.pop(order, None)
        self.model.settle()

    @invariant()
    def places_hold_what_they_should(self) -> None:
        if hasattr(self, "model"):
            assert self.device.held == self.model.held
            self.adapters.check()
            for order, req in self.reqs.items():
                assert (self.adapters.poll(req) is GateState.READY) == (order in self.model.users)


TestAdapterPlaces = AdapterPlaces.TestCase
TestAdapterPlaces.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
