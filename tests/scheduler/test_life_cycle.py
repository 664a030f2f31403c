"""Any life of any requests: the real scheduler and KV manager against a model of what clients may be told."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import nan

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bough.base.config import ScheduleConfig
from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.base.messages import Abort, Control, ControlReply, Finish, Output, Outputs, Request
from bough.kv.manager import KVManager
from bough.scheduler import loop
from bough.scheduler.gates import GateState
from bough.scheduler.loop import MAX_FAILURES, Scheduler
from bough.scheduler.req import Req, Status
from bough.sim.device import FakeDevice
from tests.sim.adapters import FakeAdapters
from tests.sim.oracle import EOS, NAMESPACES, VOCAB, Expected, expect, root_of

from .world import MODEL, request

CONTEXT, TICK = 48, 0.01
"""Longest sequence in tokens, and seconds per step."""
RIDS = ("a", "b", "c", "d", "e", "f", "g")
"""Few, so that ids are used again, in flight and after the end."""
STEMS = tuple(tuple(np.random.default_rng(i).integers(1, VOCAB, CONTEXT + 1).tolist()) for i in range(2))

BAD = (
    {"temperature": -1.0},
    {"temperature": nan},
    {"top_p": 0.0},
    {"logprobs": VOCAB},
    {"min_tokens": CONTEXT},
    {"stop_token_ids": (VOCAB,)},
    {"stop_regex": ("(",)},
    {"max_tokens": -1},
    {"max_tokens": 1 << 70},
)
BAD_ENVELOPES = (
    {"ids": b"123"},
    {"ids": np.array([1, VOCAB], "<i4").tobytes()},
    {"ids": np.array([-1], "<i4").tobytes()},
    {"rid": ""},
    {"rid": "x" * 1000},
    {"priority": 1 << 30},
    {"timeout": 0.0},
    {"timeout": nan},
)
NEXT = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.GATED: {Status.WAITING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set(),
}


class WatchedReq(Req):
    """A Req that refuses a step of its life that does not exist. It is made waiting, and may be gated only then."""

    __slots__ = ("lived",)

    @property
    def status(self):
        return Req.status.__get__(self)

    @status.setter
    def status(self, new):
        lived = getattr(self, "lived", ())
        born_gated = lived == (Status.WAITING,) and new is Status.GATED
        assert not lived or born_gated or new in NEXT[lived[-1]], f"{lived} and then {new}"
        self.lived = (*lived, new)
        Req.status.__set__(self, new)


class ScriptedGate:
    """Opens or fails when a rule says so. ``arrival`` is what the next request meets here."""

    def __init__(self):
        self.arrival = "open"
        self.work = {}

    def start(self, req):
        if self.arrival == "refuse":
            raise InvalidRequest("the gate refuses")
        if self.arrival == "crash":
            raise RuntimeError("the gate is broken")
        self.work[req.order] = self.arrival

    def poll(self, req):
        if self.work[req.order] == "wait":
            return GateState.PENDING
        if self.work.pop(req.order) == "fail":
            raise InvalidRequest("the gate failed")
        return GateState.READY

    def cancel(self, req):
        self.work.pop(req.order, None)


@dataclass
class Client:
    """One accepted request: what it has to be told, what it was told, and what may cut it short."""

    request: Request
    req: Req
    expected: Expected
    deadline: float
    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float]] = field(default_factory=list)
    finish: Finish | None = None
    aborted: bool = False
    gate_failed: bool = False
    faults: int = 0
    blamed: bool = False

    def read(self, output: Output, now: float) -> None:
        """The news continues the log, agrees with the oracle and ends for a reason that is there."""
        expected = self.expected
        assert self.finish is None and output.index == len(self.tokens) and output.n_prompt == len(self.request.prompt)
        assert self.req.status is not Status.GATED or output.finish is not None
        self.tokens += output.tokens
        self.prompt_logprobs += [(p.token, p.logprob) for p in output.prompt_logprobs or ()]
        assert self.tokens == expected.tokens[: len(self.tokens)]
        assert self.prompt_logprobs == expected.prompt_logprobs[: len(self.prompt_logprobs)]
        self.finish = output.finish
        match output.finish:
            case None:
                assert output.tokens or output.prompt_logprobs, "news without news"
            case Finish(kind="abort"):
                assert self.aborted
            case Finish(kind="timeout", status=408):
                assert now >= self.deadline
            case Finish(kind="error", status=400):
                assert self.gate_failed
            case Finish(kind="error", status=500):
                assert self.blamed or self.faults >= MAX_FAILURES, "it pays for another's failure"
            case Finish(kind=kind, matched=matched):
                assert (kind, matched, self.tokens) == (expected.kind, expected.matched, expected.tokens)
                assert self.prompt_logprobs == expected.prompt_logprobs


def stop_matcher(request):
    raise InvalidRequest("a bad pattern")


class LifeMachine(RuleBasedStateMachine):
    """Clients, an operator, gates and a device that fails, in any order."""

    @initialize(
        page=st.sampled_from((1, 4, 16)),
        depth=st.sampled_from((0, 1)),
        policy=st.sampled_from(("lpm", "fcfs", "dfs", "priority", "random")),
        eviction=st.sampled_from(("lru", "arc")),
        running=st.integers(1, 4),
        more=st.sampled_from((0, 3, 40)),
        pages=st.integers(0, 40),
        queue=st.integers(2, 6),
        queue_tokens=st.sampled_from((100, 10_000)),
    )
    def start(self, page, depth, policy, eviction, running, more, pages, queue, queue_tokens):
        self.page, self.running = page, running
        n_cells = 32 + pages // page * page
        self.kv = KVManager(n_cells, page, running, CONTEXT, eviction)
        self.most = min(CONTEXT, self.kv.capacity)
        self.device = FakeDevice(n_cells, running, CONTEXT, VOCAB, lambda init: root_of(init.seed), self.meet)
        self.gate = ScriptedGate()
        self.limits = Limits(queue_requests=queue, queue_tokens=queue_tokens)
        self.now, self.seed, self.serial, self.controls = 0.0, 0, 0, 0
        self.live: dict[str, Client] = {}
        self.ended: list[Client] = []
        self.rejected = self.aborted = 0
        self.fault = self.row_failure = None
        loop.Req = WatchedReq
        self.scheduler = Scheduler(
            ScheduleConfig(
                policy=policy, max_running=running, step_tokens=running + more, depth=depth, max_wait=5 * TICK
            ),
            self.limits,
            msgspec.structs.replace(MODEL, context_length=CONTEXT, eos_ids=EOS),
            self.kv,
            self.device,
            clock=lambda: self.now,
            draw=lambda: self.seed,
            stop_matcher=stop_matcher,
            gates=(self.gate,),
            adapters=FakeAdapters(1),
        )

    # -- the device

    def meet(self, plan):
        """What goes wrong with this plan; those that it hits are remembered."""
        owners = [self.client_of(self.scheduler._rows.req(row)) for row in plan.rows.tolist()]
        if self.fault:
            self.fault = None
            for client in self.live.values():
                # Whoever runs beside it may be in the plan that was launched behind.
                client.faults += client.req.status is Status.RUNNING
            if len(owners) == 1 and owners[0]:
                owners[0].blamed = True
            raise RuntimeError("the device failed")
        if self.row_failure is not None:
            at, self.row_failure = self.row_failure % len(owners), None
            if owners[at]:
                owners[at].blamed = True
            return {at: "logits are not finite"}
        return {}

    def client_of(self, req):
        """None when it ended while a step in flight still has its row."""
        client = self.live.get(req.request.rid)
        return client if client is not None and client.req is req else None

    @precondition(lambda self: self.fault is None and self.row_failure is None)
    @rule(row=st.none() | st.integers(0, 3))
    def break_the_next_plan(self, row):
        self.fault, self.row_failure = (True, None) if row is None else (None, row)

    # -- clients

    @rule(
        rids=st.lists(st.sampled_from(RIDS), min_size=1, max_size=4, unique=True),
        stem=st.sampled_from(STEMS),
        share=st.floats(0.1, 0.8),
        own=st.integers(0, 2),
        answer=st.sampled_from((None, 1, 4, 9, 20)),
        options=st.fixed_dictionaries(
            {}, optional={"ignore_eos": st.just(True), "prompt_logprobs": st.just(0), "temperature": st.just(1.0)}
        ),
        envelope=st.fixed_dictionaries(
            {}, optional={"priority": st.integers(-1, 1), "timeout": st.sampled_from((0.03, 0.2, 1e6))}
        ),
        gate=st.sampled_from(("open", "open", "open", "wait")),
        space=st.integers(0, 1),
    )
    def submit(self, rids, stem, share, own, answer, options, envelope, gate, space):
        """Some clients at once with one prompt, apart from its last token for every other of them."""
        n = 1 + int(share * (self.most - 2))
        max_tokens = None if answer is None else min(answer, self.most - n)
        for i, rid in enumerate(rids):
            prompt = [*stem[: n - 1], 1 + (own + i % 2) % 3]
            made = request(rid, prompt, NAMESPACES[space], max_tokens=max_tokens, **envelope, **options)
            self.send(made, space, True, gate)

    @rule(
        rid=st.sampled_from(RIDS),
        length=st.sampled_from(("0", "1", "page-1", "page", "page+1", "max-1", "max", "max+1")),
        answer=st.sampled_from((None, 0, 1, "room", "room+1")),
        prompt_logprobs=st.sampled_from((None, 0)),
        gate=st.sampled_from(("open", "open", "fail", "refuse", "crash")),
    )
    def submit_at_a_boundary(self, rid, length, answer, prompt_logprobs, gate):
        n = {"0": 0, "1": 1, "page-1": self.page - 1, "page": self.page, "page+1": self.page + 1,
             "max-1": self.most - 1, "max": self.most, "max+1": self.most + 1}[length]  # fmt: skip
        max_tokens = {"room": self.most - n, "room+1": self.most - n + 1}.get(answer, answer)
        needed = n + (1 if max_tokens is None else max_tokens)
        fits = 0 < n < CONTEXT and n <= needed <= self.most and (max_tokens != 0 or prompt_logprobs is not None)
        made = request(rid, STEMS[0][:n], NAMESPACES[0], max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
        self.send(made, 0, fits, gate)

    @rule(
        rid=st.sampled_from(RIDS),
        params=st.sampled_from((*BAD, {})),
        envelope=st.sampled_from((*BAD_ENVELOPES, {})),
    )
    def submit_nonsense(self, rid, params, envelope):
        made = request(rid, [1, 2, 3], **{"max_tokens": 2, **params})
        self.send(msgspec.structs.replace(made, **envelope), 0, not params and not envelope, "open")

    def send(self, request, space, fits, gate):
        """The answer to a refused request is there at once, is its only one, and touches nobody else."""
        refusal = self.refusal(request, fits, gate)
        self.serial += 1
        self.seed = self.serial * len(NAMESPACES) + space
        self.gate.arrival = gate
        self.scheduler.receive(request)
        if refusal is not None:
            [answer] = [output for message in self.scheduler.outbox for output in message.items]
            assert (answer.rid, answer.index, answer.tokens) == (request.rid, 0, [])
            assert (answer.finish.kind, answer.finish.status) == ("error", refusal)
            self.scheduler.outbox.clear()
            self.rejected += 1
            return
        assert not self.scheduler.outbox
        deadline = self.now + request.timeout if request.timeout is not None else float("inf")
        expected = expect(request, self.seed, self.most)
        req = self.scheduler._reqs[request.rid]
        self.live[request.rid] = Client(request, req, expected, deadline, gate_failed=gate == "fail")

    def refusal(self, request, fits, gate):
        """The status with which ``request`` must be refused, or None."""
        if request.rid in self.live:
            return 400
        statuses = Counter(client.req.status for client in self.live.values())
        suspects = len(self.scheduler._planner.suspects)
        held_up = (Status.WAITING, Status.GATED)
        waiting = [client.req for client in self.live.values() if client.req.status in held_up]
        tokens = sum(len(r.ids) for r in waiting if r not in self.scheduler._planner.suspects)
        if statuses[Status.GATED] + statuses[Status.WAITING] - suspects >= self.limits.queue_requests:
            return 429
        if tokens + len(request.ids) // 4 > self.limits.queue_tokens:
            return 429
        if not fits or gate in ("refuse", "fail"):
            return 400
        return 500 if gate == "crash" else None

    @rule(rids=st.lists(st.sampled_from((*RIDS, "nobody")), min_size=1, max_size=2), times=st.integers(1, 2))
    def abort(self, rids, times):
        hit = [self.live[rid] for rid in dict.fromkeys(rids) if rid in self.live]
        self.cut(hit)
        for _ in range(times):
            self.scheduler.receive(Abort(rids))
        self.read()
        assert all(client.finish is not None for client in hit)

    def cut(self, clients):
        self.aborted += len(clients)
        for client in clients:
            client.aborted = True

    # -- the operator, the gates and time

    @precondition(lambda self: len(self.live) > 2)
    @rule()
    def abort_all(self):
        self.cut(self.live.values())
        self.control("abort_all")
        assert not self.live

    @rule()
    def flush_cache(self):
        locked = self.kv.usage().locked
        self.control("flush_cache")
        assert self.kv.usage().tree == self.kv.usage().locked == locked

    def control(self, op):
        self.controls += 1
        self.scheduler.receive(Control(self.controls, op))
        replies = [m for m in self.scheduler.outbox if isinstance(m, ControlReply)]
        assert [(r.id, r.ok) for r in replies] == [(self.controls, True)]
        self.read()

    @precondition(lambda self: self.gate.work)
    @rule(which=st.integers(0, 5), how=st.sampled_from(("open", "open", "fail")))
    def decide_at_the_gate(self, which, how):
        order = sorted(self.gate.work)[which % len(self.gate.work)]
        self.gate.work[order] = how
        for client in self.live.values():
            if client.req.order == order:
                client.gate_failed = how == "fail"

    @rule(seconds=st.sampled_from((0.02, 0.5, 1e7)))
    def advance(self, seconds):
        self.now += seconds

    @rule(n=st.sampled_from((1, 2, 3, 10)))
    def step(self, n):
        self.turn(n)

    @precondition(lambda self: self.live)
    @rule()
    def step_once(self):
        self.turn(1)

    def turn(self, n):
        for _ in range(n):
            began = self.now
            self.scheduler.step()
            self.read()
            assert all(client.deadline > began for client in self.live.values()), "somebody outlives the deadline"
            self.now += TICK
            self.everything_has_one_owner()

    def read(self):
        for message in self.scheduler.outbox:
            for output in message.items if isinstance(message, Outputs) else ():
                client = self.live.get(output.rid)
                assert client is not None, f"news of {output.rid} after its end: {output}"
                client.read(output, self.now)
                if client.finish is not None:
                    self.ended.append(self.live.pop(output.rid))
        self.scheduler.outbox.clear()

    # -- what always holds

    @invariant()
    def everything_has_one_owner(self):
        self.scheduler.check()
        self.kv.waiting.check()
        usage = self.kv.usage()
        assert usage.free + usage.tree + usage.private == usage.total == self.kv.capacity
        assert usage.locked <= usage.tree

    @invariant()
    def the_scheduler_knows_whom_it_serves(self):
        statuses = Counter(client.req.status for client in self.live.values())
        stats = self.scheduler.stats()
        assert statuses[Status.FINISHED] == 0, "it ended without a word"
        assert statuses[Status.RUNNING] <= stats.running <= self.running
        assert stats.waiting == statuses[Status.GATED] + statuses[Status.WAITING]
        # Those that lost a row come back to a queue that may have filled up since.
        assert stats.waiting <= self.limits.queue_requests + self.running
        gated = sorted(c.req.order for c in self.live.values() if c.req.status is Status.GATED)
        assert sorted(self.gate.work) == gated, "a gate works for nobody, or forgot somebody"

    @invariant()
    def the_counters_add_up(self):
        stats = self.scheduler.stats()
        assert (stats.finished, stats.rejected, stats.aborted) == (len(self.ended), self.rejected, self.aborted)
        told = sum(len(client.tokens) for client in (*self.ended, *self.live.values()))
        assert stats.generated_tokens == told

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        loop.Req = Req
        self.fault = self.row_failure = None
        self.gate.work = dict.fromkeys(self.gate.work, "open")
        steps = 0
        while not self.scheduler.idle:
            self.turn(1)
            steps += 1
            assert steps < (len(self.live) + 2) * 8 * CONTEXT, "no end"
        assert not self.live and all(client.finish is not None for client in self.ended)
        usage = self.kv.usage()
        assert usage.locked == usage.private == usage.rows == 0
        assert not len(self.kv.waiting) and not self.kv.waiting._places
        self.kv.flush()
        assert self.kv.usage().free == self.kv.capacity
        self.the_scheduler_knows_whom_it_serves()
        self.the_counters_add_up()


@pytest.fixture(autouse=True)
def quiet(caplog):
    """Failures on purpose are not worth a log."""
    caplog.set_level(logging.CRITICAL, logger="bough.scheduler")


def machine(examples, steps):
    case = LifeMachine.TestCase
    made = type("Case", (case,), {})
    made.settings = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return made


TestLives = machine(250, 40)
TestManyLives = pytest.mark.slow(machine(1500, 60))
