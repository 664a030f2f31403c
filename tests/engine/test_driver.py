"""The loop against a transport that misbehaves on purpose."""

from __future__ import annotations

from bough.base.messages import FromEngine, Hello, Output, Outputs, Stats
from bough.engine.driver import Attach, Delivery, Driver, Peer, ToDriver

from .scripted import HOLD, ScriptedCore, expected, request


class Port:
    """Hands over ``inbox``; each peer takes as many messages as ``room`` says, or is not in it any more."""

    def __init__(self, **room: int) -> None:
        self.bad_messages = 0
        self.inbox: list[tuple[Peer, ToDriver]] = []
        self.room = {name.encode(): n for name, n in room.items()}
        self.sent: dict[Peer, list[FromEngine]] = {peer: [] for peer in self.room}
        self.waits: list[float] = []
        self.closed = False

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        self.waits.append(timeout)
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        if peer not in self.room:
            return "gone"
        if len(self.sent[peer]) >= self.room[peer]:
            return "full"
        self.sent[peer].append(message)
        return "sent"

    def close(self) -> None:
        self.closed = True

    def tokens(self, peer: Peer) -> list[int]:
        outputs = [m for m in self.sent[peer] if isinstance(m, Outputs)]
        return [token for message in outputs for output in message.items for token in output.tokens]

    def finishes(self, peer: Peer) -> list[Output]:
        return [o for m in self.sent[peer] if isinstance(m, Outputs) for o in m.items if o.finish is not None]


def test_a_peer_that_stops_reading_is_given_up_and_greeted_again() -> None:
    core, port = ScriptedCore(), Port(slow=5, fast=1 << 20)
    driver = Driver(core, port)
    port.inbox = [(b"slow", request("s", [5])), (b"fast", request("f", [6], 100))]
    for _ in range(120):
        driver.turn()
    assert core.scheduler.aborted == [5]
    assert port.tokens(b"fast") == expected([6], 100)
    assert port.tokens(b"slow") == expected([5], len(port.tokens(b"slow")))

    # What it sends until it is greeted again would be forgotten at its side: it is not taken.
    port.inbox = [(b"slow", request("t", [5], 3))]
    driver.turn()
    assert not core.scheduler.requests
    port.room[b"slow"] = 1 << 20
    driver._next_beat = 0.0
    driver.turn()
    hello = [i for i, m in enumerate(port.sent[b"slow"]) if isinstance(m, Hello)]
    assert len(hello) == 2
    port.inbox = [(b"slow", request("t", [5], 3))]
    for _ in range(5):
        driver.turn()
    assert [o.rid for o in port.finishes(b"slow")] == ["t"]


def test_a_peer_that_dies_is_forgotten() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    port.inbox = [(b"a", request("r", [HOLD])), (b"ghost", request("g", [HOLD]))]
    driver.turn()
    assert list(core.scheduler.requests) == ["r"]  # the ghost could not even be greeted
    del port.room[b"a"]
    driver._next_beat = 0.0
    driver.turn()
    assert core.scheduler.aborted == [HOLD]


def test_an_idle_loop_waits_and_a_busy_one_does_not() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    driver.turn()  # the first heartbeat is due at once
    driver.turn()
    assert port.waits[-1] > 0.0
    port.inbox = [(b"a", request("r", [HOLD]))]
    driver.turn()
    driver.turn()
    assert port.waits[-1] == 0.0


def test_a_step_waits_as_long_as_the_scheduler_says_and_no_longer_than_the_engine_runs() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    port.inbox = [(b"a", request("r", [HOLD]))]
    core.scheduler.moments = [0.004, 0.002]
    driver.turn()
    assert port.waits[-2:] == [0.004, 0.002] and core.scheduler.steps == 1
    core.scheduler.moments = [0.004, 0.002]
    driver.stop()
    driver.turn()
    assert port.waits[-1] == 0.0


def test_attaching_is_answered_with_hello_and_a_heartbeat() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    driver.turn()
    port.inbox = [(b"a", Attach())]
    driver.turn()
    assert [type(m) for m in port.sent[b"a"]] == [Hello, Stats]


def test_an_answer_follows_the_counters_that_it_has_led_to() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    driver.turn()
    port.inbox = [(b"a", request("held", [HOLD])), (b"a", request("r", [5], 3))]
    for _ in range(5):
        driver.turn()
    kinds = [type(m) for m in port.sent[b"a"]]
    last = next(i for i, m in enumerate(port.sent[b"a"]) if isinstance(m, Outputs) and m.items[0].finish is not None)
    assert kinds[last - 1] is Stats and kinds.count(Stats) == 1


def test_a_stopping_loop_ends_what_is_in_flight() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    port.inbox = [(b"a", request("r", [HOLD]))]
    driver.turn()
    driver.stop()
    driver.run()
    (last,) = port.finishes(b"a")
    assert last.finish is not None and last.finish.kind == "abort"
    assert port.closed


def test_what_can_wait_is_done_while_nobody_waits() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    core.tasks = 2
    driver = Driver(core, port)
    driver.turn()
    assert core.tasks == 2, "a client may be waiting to be told that the start is over"
    port.inbox = [(b"a", Attach())]
    driver.turn()
    assert core.tasks == 2 and isinstance(port.sent[b"a"][0], Hello)
    port.inbox = [(b"a", request("r", [5], 3))]
    driver.turn()  # which takes the request in behind a first task
    assert core.tasks == 1
    while not core.scheduler.idle:
        driver.turn()
    assert core.tasks == 1
    waits = len(port.waits)
    driver.turn()
    driver.turn()
    assert core.tasks == 0 and port.waits[waits] == 0.0 and port.waits[waits + 1] > 0.0


def test_memory_keeps_up_behind_every_step_and_what_it_says() -> None:
    core, port = ScriptedCore(), Port(a=1 << 20)
    driver = Driver(core, port)
    port.inbox = [(b"a", request("r", [5, 6]))]
    for turns in range(1, 4):
        driver.turn()
        assert core.kept_up == [0] * turns, "nobody waits for it to be told"
