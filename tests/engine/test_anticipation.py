"""The driver and the scheduler wait for who comes back at once, on a simulated clock."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import numpy as np
import pytest

from bough.base.config import ScheduleConfig
from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import FromEngine, Hello, ModelInfo, Outputs, Request
from bough.base.params import SamplingParams
from bough.engine.driver import Delivery, Driver, Peer, ToDriver
from bough.kv.manager import KVManager
from bough.scheduler.loop import Scheduler
from bough.sim.clocked import ClockedDevice, Cost, Time

from .scripted import ScriptedCore

COST = Cost(step=0.01, token=0.001, row=0.001)
N, TURNS, ANSWER, NEW, LONG = 6, 8, 24, 50, 4096
MODEL = ModelInfo(
    name="clocked",
    path="",
    architecture="none",
    vocab_size=1000,
    context_length=LONG,
    eos_ids=(),
    dtype="none",
    n_parameters=0,
)


class Chats:
    """``N`` conversations that begin together, as a port: each asks about ``back`` seconds after its last answer again.

    Time passes as it is waited.
    """

    def __init__(self, time: Time, back: float) -> None:
        self.bad_messages = 0
        self.firsts: list[float] = []
        """Seconds to the first token, of the turns behind the first one."""
        self._time, self._back = time, back
        self._random = random.Random(0)
        self._due = [(0.0, name, 0) for name in range(N)]
        self._texts = [np.full(0, name, np.int32) for name in range(N)]
        self._asked: dict[str, float] = {}

    @property
    def over(self) -> bool:
        return not self._due and not self._asked

    def receive(self, timeout: float) -> list[tuple[Peer, ToDriver]]:
        until = min([self._time.now + timeout, *(at for at, _, _ in self._due[:1])])
        self._time.now = max(self._time.now, until)
        messages: list[tuple[Peer, ToDriver]] = []
        while self._due and self._due[0][0] <= self._time.now:
            at, name, turn = heapq.heappop(self._due)
            self._texts[name] = np.append(self._texts[name], np.full(NEW, name, np.int32)).astype("<i4")
            rid = f"{name}/{turn}"
            self._asked[rid] = at
            params = SamplingParams(max_tokens=ANSWER, seed=1, temperature=0.0, ignore_eos=True)
            messages.append((b"chats", Request(rid=rid, ids=self._texts[name].tobytes(), params=params)))
        return messages

    def send(self, peer: Peer, message: FromEngine) -> Delivery:
        for output in message.items if isinstance(message, Outputs) else []:
            name, turn = map(int, output.rid.split("/"))
            self._texts[name] = np.append(self._texts[name], np.array(output.tokens, np.int32))
            if turn and output.tokens and not output.index:
                self.firsts.append(self._time.now - self._asked[output.rid])
            if output.finish is not None:
                del self._asked[output.rid]
                if turn + 1 < TURNS:
                    heapq.heappush(
                        self._due, (self._time.now + self._back * self._random.uniform(0.5, 1.5), name, turn + 1)
                    )
        return "sent"

    def close(self) -> None:
        pass


class Impatient(Scheduler):
    def patience(self) -> float:
        return 0.0


@dataclass
class ClockedCore:
    scheduler: Scheduler
    hello: Hello

    def prepare(self) -> bool:
        return False

    def keep_up(self) -> None:
        pass

    def close(self) -> None:
        pass


def play(back: float, patient: bool = True, depth: int = 0) -> tuple[float, float]:
    """Conversations to their end: median seconds to a first token, and of all of them together."""
    time = Time()
    scheduler = (Scheduler if patient else Impatient)(
        ScheduleConfig(max_running=16, step_tokens=128, depth=depth),
        DEFAULT_LIMITS,
        MODEL,
        KVManager(1 << 14, 1, 16, LONG),
        ClockedDevice(time, COST, {1: [7] * ANSWER}, lambda seed: None),
        clock=time,
        draw=lambda: 1,
        stop_matcher=lambda request: pytest.fail("there are no stop strings"),
    )
    chats = Chats(time, back)
    driver = Driver(ClockedCore(scheduler, ScriptedCore().hello), chats)
    while not chats.over:
        driver.turn()
    return float(np.median(chats.firsts)), time.now


@pytest.mark.parametrize(("depth", "gained"), [(0, 0.6), (1, 0.75)])
def test_conversations_that_end_together_are_not_late_one_behind_the_other(depth: int, gained: float) -> None:
    """Each would miss the step in which the one before it has its prompt computed."""
    late, long = play(back=0.003, patient=False, depth=depth)
    first, took = play(back=0.003, depth=depth)
    assert first < gained * late
    assert took < 1.02 * long


def test_who_does_not_come_back_at_once_costs_next_to_nothing() -> None:
    late, long = play(back=0.5, patient=False)
    first, took = play(back=0.5)
    assert took < 1.01 * long
    assert first < 1.05 * late
