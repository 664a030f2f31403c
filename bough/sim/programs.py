"""Traces of programs, and their replay through the real scheduler and cache on a clocked device.

A trace names the blocks of each prompt by ids that stand for whole prefixes; here a block becomes its own run of
tokens, so that equal prefixes, and only they, are equal tokens. Where a call's prompt goes on from the one before it,
the answer in between is made of the tokens that follow, so that what was generated is found again.
"""

from __future__ import annotations

import gzip
import heapq
import json
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bough.base.config import PolicyName, ScheduleConfig
from bough.base.limits import Limits
from bough.base.messages import ModelInfo, Outputs, Request
from bough.base.params import SamplingParams
from bough.base.plan import Ints
from bough.base.program import Program
from bough.kv.manager import KVManager
from bough.scheduler.loop import Scheduler
from bough.sim.clocked import ClockedDevice, Cost, Time

RECORDED_SPEED = 150.0
"""Tokens per second that the models of the recorded traces generated: what is left of a gap is the program's pause."""
Told = Literal["pauses", "uses", "future"]
"""What a program says with each request: the pause after it, also how many follow, or what no program can know: how
much memory it is going to hold and for how long, as a deadline, so that whoever holds least goes first."""
FAR = 1e6
"""Seconds that no replay takes: deadlines beyond it order programs and hurry nobody."""
PATIENCE = 0.05
"""Seconds that pass at once while everybody waits and nobody may run."""

CHARS, BLOCK = 4, 16
"""Characters for a token of a text, and tokens for a hash id, where a trace has texts."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a program: its prompt and answer, and the pause in seconds before the next one."""

    ids: Ints
    answer: Ints
    pause: float


@dataclass(frozen=True, slots=True)
class Task:
    """A program of a trace; ``arrival`` in seconds is where the trace is replayed by its clock."""

    name: str
    calls: list[Call]
    arrival: float = 0.0

    @property
    def n_prompt(self) -> int:
        return sum(len(call.ids) for call in self.calls)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The records of a gzipped JSON-lines trace."""
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def read_texts(path: Path) -> list[dict[str, Any]]:
    """The records of an archive of agents' texts (LMCache agent traces), in the form of :func:`agents`.

    ``CHARS`` characters make a token; as in the other traces a hash id stands for the whole prefix up to it.
    """
    ids: dict[tuple[int, str], int] = {}
    records = []
    with tarfile.open(path) as archive:
        files = sorted((m for m in archive.getmembers() if m.name.endswith(".jsonl")), key=lambda m: m.name)
        for session, member in enumerate(files):
            extracted = archive.extractfile(member)
            assert extracted is not None
            lines = sorted((json.loads(line) for line in extracted), key=lambda line: line["timestamp"])
            for turn, line in enumerate(lines):
                text, before, hashes = line["input"], -1, []
                for start in range(0, len(text) - CHARS * BLOCK + 1, CHARS * BLOCK):
                    before = ids.setdefault((before, text[start : start + CHARS * BLOCK]), len(ids))
                    hashes.append(before)
                records.append(
                    {
                        "timestamp": line["timestamp"] / 1e3, "session": session, "turn": turn, "hash_ids": hashes,
                        "kind": Path(member.name).parent.name, "input_length": max(1, len(text) // CHARS),
                        "output_length": max(1, len(line["output"]) // CHARS),
                    }
                )  # fmt: skip
    return records


def agents(records: Iterable[dict[str, Any]], block: int, unit: int) -> list[Task]:
    """The sessions of a trace as programs, in order of their first call.

    One token stands for ``unit`` of the trace's, which has ``block`` of them per hash id.
    """
    sessions: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        sessions.setdefault(record["session"], []).append(record)
    fresh = _Fresh(1 + max(h for turns in sessions.values() for t in turns for h in t["hash_ids"]), block // unit)
    return [
        Task(f"{turns[0]['kind']}-{name}", _calls(sorted(turns, key=lambda t: t["turn"]), block, unit, fresh))
        for name, turns in sorted(sessions.items(), key=lambda item: item[1][0]["timestamp"])
    ]


class _Fresh:
    """Tokens that occur nowhere else."""

    def __init__(self, first_block: int, block: int) -> None:
        self._next = first_block * block

    def take(self, n: int) -> Ints:
        self._next += n
        return np.arange(self._next - n, self._next, dtype=np.int32)


def _calls(turns: Sequence[dict[str, Any]], block: int, unit: int, fresh: _Fresh) -> list[Call]:
    calls, block = [], block // unit
    for k, turn in enumerate(turns):
        blocks = turn["hash_ids"]
        ids = _spread(blocks, block)
        later = next((t["hash_ids"] for t in turns[k + 1 : k + 2] if t["hash_ids"][: len(blocks)] == blocks), None)
        beyond = _spread(later[len(blocks) :], block) if later else ids[:0]
        tail, n_answer = -(-turn["input_length"] // unit) - len(ids), max(1, round(turn["output_length"] / unit))
        more = np.concatenate([beyond[: tail + n_answer], fresh.take(max(0, tail + n_answer - len(beyond)))])
        pause = 0.0
        if k + 1 < len(turns):
            pause = (turns[k + 1]["timestamp"] - turn["timestamp"]) / 1e3 - turn["output_length"] / RECORDED_SPEED
        ids = np.concatenate([ids, more[: max(0, tail)]]) if tail > 0 else ids
        calls.append(Call(ids, more[max(0, tail) :], max(0.05, pause)))
    return calls


def _spread(blocks: Sequence[int], block: int) -> Ints:
    """``block`` tokens for each id."""
    spread: Ints = np.add.outer(np.array(blocks, np.int32) * np.int32(block), np.arange(block, dtype=np.int32)).ravel()
    return spread


def chats(records: Sequence[dict[str, Any]], block: int, unit: int) -> list[Task]:
    """Every request of a trace without sessions as a program of one call, at its own time.

    One token stands for ``unit`` of the trace's, which has ``block`` of them per hash id.
    """
    per = block // unit
    fresh = _Fresh(1 + max(h for r in records for h in r["hash_ids"]), per)
    tasks = []
    for i, r in enumerate(records):
        ids = _spread(r["hash_ids"], per)[: max(1, -(-r["input_length"] // unit))]
        answer = fresh.take(max(1, r["output_length"] // unit))
        tasks.append(Task(f"chat-{i}", [Call(ids, answer, 0.0)], r["timestamp"] / 1e3))
    return tasks


def independents(n: int, prompt: int, answer: int, rate: float, seed: int = 0) -> list[Task]:
    """``n`` programs of one call that share nothing, ``rate`` a second, with lengths up to twice the given ones."""
    rng = np.random.default_rng(seed)
    fresh, tasks, arrival = _Fresh(0, 1), [], 0.0
    for i in range(n):
        arrival += float(rng.exponential(1 / rate))
        ids, said = fresh.take(int(rng.integers(1, 2 * prompt))), fresh.take(int(rng.integers(1, 2 * answer)))
        tasks.append(Task(f"alone-{i}", [Call(ids, said, 0.0)], arrival))
    return tasks


def fitting(tasks: Iterable[Task], n_tokens: int) -> list[Task]:
    """The programs as a pool of ``n_tokens`` can serve them: each ends before its first call that does not fit."""
    cut = []
    for task in tasks:
        n = next((i for i, c in enumerate(task.calls) if len(c.ids) + len(c.answer) > n_tokens), len(task.calls))
        if n:
            cut.append(Task(task.name, task.calls[:n], task.arrival))
    return cut


def footprint(tasks: Iterable[Task]) -> int:
    """Distinct tokens of all prompts."""
    return len(np.unique(np.concatenate([call.ids for task in tasks for call in task.calls])))


def held(calls: Iterable[Call], cost: Cost) -> float:
    """Tokens times seconds that ``calls`` hold in the cache: each for as long as it generates alone, and pauses."""
    return sum((len(c.ids) + len(c.answer)) * (cost.unit * len(c.answer) * cost.step + c.pause) for c in calls)


@dataclass(slots=True)
class Entry:
    """One request of a replay, as it was admitted: what a clairvoyant cache is asked for."""

    ids: Ints
    answer: Ints
    cached: int = 0


@dataclass(slots=True)
class Result:
    """What a replay measured. Seconds of the simulated clock.

    Attributes:
        prompt_tokens, cached_tokens: of all requests, when they were first admitted.
        completion: per program, from when its client opened it to its last token.
        latency: per request, from arrival to its last token.
        seconds: until the last program ended; ``busy`` of them the device computed.
        log: ``(True, i)`` where request i was admitted and ``(False, i)`` where it ended, in order.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    retracted: int = 0
    completion: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    seconds: float = 0.0
    busy: float = 0.0
    steps: int = 0
    entries: list[Entry] = field(default_factory=list)
    log: list[tuple[bool, int]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class Setting:
    """One replay: ``open_programs`` at a time, or by the trace's own clock sped up by ``speed`` where that is 0."""

    pool: int
    policy: PolicyName
    eviction: str
    cost: Cost
    open_programs: int = 0
    speed: float = 1.0
    page_size: int = 1
    max_running: int = 64
    step_tokens: int = 2048
    told: Told = "pauses"
    max_wait: float = 5.0


class Replay:
    """Clients that run their programs against one scheduler, each call after the answer and the pause before it."""

    def __init__(self, tasks: Sequence[Task], setting: Setting) -> None:
        self._setting = setting
        self._tasks = tasks
        self._time = Time()
        self._answers: dict[int, Sequence[int]] = {}
        longest = max(len(c.ids) + len(c.answer) for t in tasks for c in t.calls)
        top = max(int(max(c.ids.max(), c.answer.max())) for t in tasks for c in t.calls)
        self.result = Result()
        self._device = ClockedDevice(self._time, setting.cost, self._answers, self._admitted)
        self.kv = KVManager(
            setting.pool // setting.page_size * setting.page_size, setting.page_size, setting.max_running, longest,
            setting.eviction,
        )  # fmt: skip
        model = ModelInfo(
            name="clocked", path="", architecture="none", vocab_size=top + 1, context_length=longest, eos_ids=(),
            dtype="none", n_parameters=0,
        )  # fmt: skip
        self.scheduler = Scheduler(
            ScheduleConfig(
                policy=setting.policy, max_running=setting.max_running, step_tokens=setting.step_tokens, depth=1,
                max_wait=setting.max_wait,
            ),
            Limits(queue_requests=1 << 20, queue_tokens=1 << 50),
            model, self.kv, self._device, clock=self._time, draw=lambda: 1, stop_matcher=_no_matcher,
        )  # fmt: skip
        self._events: list[tuple[float, int, int, int]] = []
        self._opened: dict[int, float] = {}
        self._sent: dict[str, tuple[int, int, float, int]] = {}
        self._serial = 0

    def _admitted(self, seed: int) -> None:
        self.result.log.append((True, seed))

    def run(self) -> Result:
        """Play everything; the measures."""
        waiting = deque(range(len(self._tasks)))
        if self._setting.open_programs:
            for _ in range(min(self._setting.open_programs, len(waiting))):
                self._open(waiting.popleft(), 0.0)
        else:
            for i in waiting:
                self._open(i, self._tasks[i].arrival / self._setting.speed)
            waiting.clear()
        scheduler, result, time = self.scheduler, self.result, self._time
        while self._events or not scheduler.idle:
            self._send_due()
            if scheduler.idle:
                time.now = self._events[0][0]
                continue
            while wait := scheduler.patience():
                self._pass(wait)
                self._send_due()
            before = time.now
            scheduler.step()
            for done in self._read():
                if waiting and self._setting.open_programs:
                    self._open(waiting.popleft(), time.now)
                result.completion.append(time.now - self._opened.pop(done))
            if scheduler.stalled or (time.now == before and not scheduler._in_flight):
                self._pass(PATIENCE)
        stats = scheduler.stats()
        result.prompt_tokens, result.cached_tokens = stats.prompt_tokens, stats.cached_tokens
        result.computed_tokens, result.retracted, result.steps = stats.computed_tokens, stats.retracted, stats.steps
        result.seconds, result.busy = time.now, self._device.busy
        return result

    def _open(self, task: int, at: float) -> None:
        self._opened[task] = at
        self._later(at, task, 0)

    def _later(self, at: float, task: int, call: int) -> None:
        self._serial += 1
        heapq.heappush(self._events, (at, self._serial, task, call))

    def _pass(self, seconds: float) -> None:
        """So much time passes, or less if somebody comes meanwhile, or is there."""
        time = self._time
        time.now = max(time.now, min([time.now + seconds, *(e[0] for e in self._events[:1])]))

    def _send_due(self) -> None:
        while self._events and self._events[0][0] <= self._time.now:
            _, _, task, call = heapq.heappop(self._events)
            self._send(task, call)

    def _send(self, number: int, index: int) -> None:
        task = self._tasks[number]
        call = task.calls[index]
        seed = len(self.result.entries)
        self.result.entries.append(Entry(call.ids, call.answer))
        self._answers[seed] = call.answer.tolist()
        program = self._envelope(task, index) if len(task.calls) > 1 else None
        rid = f"{task.name}/{index}"
        self._sent[rid] = number, index, self._time.now, seed
        self.scheduler.receive(
            Request(
                rid=rid,
                ids=call.ids.astype("<i4").tobytes(),
                params=SamplingParams(max_tokens=len(call.answer), temperature=0.0, seed=seed, ignore_eos=True),
                program=program,
            )
        )

    def _envelope(self, task: Task, index: int) -> Program:
        told, follow = self._setting.told, len(task.calls) - index - 1
        deadline = None
        if told == "future":
            deadline = FAR + held(task.calls[index:], self._setting.cost) - self._time.now
        return Program(
            id=task.name, end=not follow, pause=task.calls[index].pause, deadline=deadline,
            next_uses=None if told == "pauses" else follow,
        )  # fmt: skip

    def _read(self) -> Iterator[int]:
        """Take the outbox, send what follows; the programs that are done."""
        result = self.result
        outbox, self.scheduler.outbox = self.scheduler.outbox, []
        for output in (o for m in outbox if isinstance(m, Outputs) for o in m.items if o.finish is not None):
            assert output.finish is not None and output.finish.kind == "length", output
            number, index, since, seed = self._sent.pop(output.rid)
            result.log.append((False, seed))
            result.entries[seed].cached = output.n_cached
            result.latency.append(self._time.now - since)
            calls = self._tasks[number].calls
            if index + 1 == len(calls):
                yield number
            else:
                self._later(self._time.now + calls[index].pause, number, index + 1)


def _no_matcher(request: Request) -> Any:
    raise AssertionError("these requests have no stop strings")
