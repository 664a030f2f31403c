"""One script, run: the real scheduler, KV manager, queue, policies, planner and committer on a fake device and clock.

Whatever happens is a function of the script. After every step all invariants are checked and every output is
compared with the answer that the oracle gives for its request alone.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from bough.base.config import ScheduleConfig
from bough.base.errors import InvalidRequest, NotFound
from bough.base.limits import Limits
from bough.base.messages import Abort as AbortMessage
from bough.base.messages import Control as ControlMessage
from bough.base.messages import ControlOp, ControlReply, Finish, ModelInfo, Output, Outputs, Request
from bough.base.plan import Ints
from bough.grammar.compiler import GrammarCompiler
from bough.kv.manager import CacheKind, KVManager, WindowSize
from bough.scheduler.loop import MAX_FAILURES, Scheduler
from bough.scheduler.req import Status
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopMatcher

from .adapters import BROKEN, FakeAdapters
from .ahead import Ahead, as_message
from .fairness import Fairness
from .gates import ScriptedGate, refused_by_gates
from .grammar import Background, FakeBackend, tags
from .invariants import Checker
from .oracle import CONTEXT, EOS, VOCAB, Expected, Letters, expect
from .pipeline import Pipeline, Violation, require
from .programs import Accounts, Ledger
from .script import Abort, Arrive, Control, EndProgram, Event, Fault, Jump, Operate, Prefetch, Script

MODEL = ModelInfo(
    name="fake", path="", architecture="fake", vocab_size=VOCAB, context_length=CONTEXT, eos_ids=EOS, dtype="none",
    n_parameters=0,
)  # fmt: skip
TICK = 0.01
"""Seconds per step of the fake clock."""

logging.getLogger("bough.scheduler").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class Reader:
    """A client: what it asked, what it read so far and what cut it short.

    ``opens`` is the step from which on it may run at all.
    """

    arrival: Arrive
    deadline: float
    expected: Expected
    opens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, float]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float]] = field(default_factory=list)
    n_cached: int = 0
    finish: Finish | None = None
    aborted: bool = False


class Simulation:
    """Runs ``script``; raises :class:`Violation` (or whatever the code under test raises) when something is wrong."""

    def __init__(self, script: Script, trace: bool = False) -> None:
        settings = script.settings
        self._settings = settings
        self._trace = trace
        self._events = list(reversed(script.events))
        self._pins = any(isinstance(e, Operate) and e.pinned for e in script.events)
        self.arrivals = {e.seed: e for e in script.events if isinstance(e, Arrive)}
        self.arrivals |= {e.what.seed: e.what for e in script.events if isinstance(e, Prefetch)}
        self.now, self._readings = 0.0, 0
        self.steps = 0
        self.readers: dict[str, Reader] = {}
        self.ended: list[Reader] = []
        self.crc = 0
        self.accounts = Accounts(lambda: self.now)
        self.kv = KVManager(
            n_tokens=settings.n_cells,
            page_size=settings.page_size,
            n_rows=settings.max_running,
            max_len=CONTEXT,
            eviction=settings.eviction,
            cache=cast(CacheKind, settings.cache),
            window=WindowSize(settings.window, settings.window_cells, settings.chunked) if settings.window else None,
        )
        self.pipeline = Pipeline(settings, self.arrivals, self._rid_of)
        self.pipeline.adapters = FakeAdapters(settings.adapter_places, lambda: self.steps, settings.slow_adapters)
        self._poison_what_is_freed()
        self.background = Background(lambda: self.steps)
        self.gates = [ScriptedGate(i, self.arrivals, self) for i in range(2)]
        self._seed: int | None = None
        self._draws = 0
        config = ScheduleConfig(
            policy=settings.policy,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,  # type: ignore[arg-type]
            mixed_tokens=settings.mixed_tokens,
            depth=settings.depth,
            max_wait=settings.max_wait,  # type: ignore[arg-type]
            jump_forward="on" if settings.jump else "off",
        )
        limits = Limits(queue_requests=settings.queue_requests)
        self.scheduler = Scheduler(
            config,
            limits,
            MODEL,
            self.kv,
            self.pipeline,
            clock=self._clock,
            draw=self._draw,
            stop_matcher=_stop_matcher,
            gates=tuple(self.gates),
            compiler=GrammarCompiler(
                FakeBackend(), limits, self.background.submit, settings.max_running + len(script.events), tags()
            ),
            adapters=self.pipeline.adapters,
        )
        self.scheduler._planner._headroom = settings.headroom
        self.scheduler._programs.turn_share = settings.turn_share
        Fairness(self.scheduler, self.kv, settings, lambda: self.now)
        self._checker = Checker(self.scheduler, self.kv, self.pipeline)
        self._ahead = Ahead(self.scheduler, self.kv, settings.step_tokens)
        self._ledger = Ledger(self.scheduler, self.kv, self._clock)
        self._held_back: list[Arrive] = []
        self._quiet = self._barren = self._readings = 0
        self._rejected = 0
        self._arriving = ""
        self._controls = 0
        self._loads: set[int] = set()
        """Commands to load an adapter that wait for their reply."""

    # -- the run

    def run(self) -> int:
        """Play the script and then wait for the end; returns a checksum of all plans and outputs."""
        while self._events or self._held_back or not self.scheduler.idle:
            self.step()
        require(not self.readers, "I10 drain", "the scheduler is idle and owes {} an end", list(self.readers))
        require(not self._loads, "I10 drain", "the commands {} have no reply", self._loads)
        self._checker.drained(self)
        self._add_up()
        return zlib.crc32(self.pipeline.crc.to_bytes(8, "little"), self.crc)

    def step(self) -> None:
        waiting, self._held_back = self._held_back, []
        for arrival in waiting:
            self._arrive(arrival)
        while self._events and self._events[-1].step <= self.steps:
            self._play(self._events.pop())
        launches, began, self._readings = self.pipeline.launches, self.now, 0
        self.scheduler.step()
        self.steps += 1
        news = self._read()
        self._progress(news, self.pipeline.launches > launches)
        self._checker.step()
        self._ledger.step()
        for rid, reader in list(self.readers.items()):
            require(reader.deadline > began, "timeout", "{} is past its deadline", rid)
            if reader.arrival.quit_after is not None and len(reader.tokens) >= reader.arrival.quit_after:
                self._abort(rid)
        self.now += TICK

    def _play(self, event: Event) -> None:
        if self._trace:
            print(f"step {self.steps}: {event}")
        match event:
            case Arrive():
                self._arrive(event)
            case Abort(rids=rids):
                self._abort(*rids)
            case Control(op=op):
                self._control(op)
            case Operate():
                self._operate(event)
            case Prefetch():
                self._seed = event.what.seed
                self.scheduler.receive(as_message(event))
                self._seed = None
            case Jump(seconds=seconds):
                self.now += seconds
            case EndProgram(tenant=tenant, program=program, abort=abort):
                self._end_program(tenant, program, abort)
            case Fault(when=when):
                self.pipeline.fault = when

    # -- what clients do

    def _arrive(self, arrival: Arrive) -> None:
        request, scheduler = arrival.request, self.scheduler
        if request.rid in self.readers:
            self._held_back.append(arrival)
            return
        most = min(CONTEXT, self.kv.capacity)
        deadline = self.now + request.timeout if request.timeout is not None else float("inf")
        opens = self.steps + max((delay for delay, _ in arrival.gates), default=0)
        reader = Reader(arrival, deadline, expect(request, arrival.seed, most), opens)
        self.readers[request.rid] = reader
        waiting = len(scheduler._queue) + len(scheduler._gates)
        text = request.constraint.text if request.constraint is not None else ""
        hopeless = self.background.known_failure(text) or self.accounts.refuses(request)
        self._seed, self.background.expected = arrival.seed, text
        scheduler.receive(request)
        self._seed = None
        self._arriving = request.rid
        self._read()
        self._arriving = ""
        status = reader.finish.status if reader.finish is not None else 200
        need = len(request.ids) // 4 + (1 if request.params.max_tokens is None else request.params.max_tokens)
        if waiting >= self._settings.queue_requests:
            require(status == 429, "I11 queue", "{} got {} and {} wait", request.rid, status, waiting)
        elif need > most or refused_by_gates(arrival) or hopeless:
            missing = request.namespace.adapter == BROKEN or self._pins
            require(status == 400 or missing, "I8 refusal", "{} got {}", request.rid, status)
        elif request.namespace.adapter != BROKEN and not self._pins:
            require(reader.finish is None, "I8 refusal", "{} got {}", request.rid, reader.finish)
        self._rejected += status != 200
        if reader.finish is None:
            self.accounts.arrived(request)

    def _abort(self, *rids: str) -> None:
        """Abort, twice; the terminal event is there at once."""
        for rid in rids:
            if rid in self.readers:
                self.readers[rid].aborted = True
        self.scheduler.receive(AbortMessage(list(rids)))
        self.scheduler.receive(AbortMessage(list(rids)))
        self._read()
        for rid in rids:
            require(rid not in self.readers, "abort", "{} goes on after an abort", rid)

    def _end_program(self, tenant: str, program: str, abort: bool) -> None:
        """Close it; with an abort, the terminal events of all its requests are there at once, and only theirs."""
        known = self.accounts.knows((tenant, program), abort)
        members = self.accounts.closed((tenant, program), abort)
        before = len(self.readers)
        for rid in members:
            self.readers[rid].aborted = True
        self._controls += 1
        op: ControlOp = "cancel_program" if abort else "end_program"
        try:
            self.scheduler.receive(ControlMessage(self._controls, op, {"tenant": tenant, "program": program}))
            require(known, "program", "{} ended, which is not known", program)
        except NotFound:
            require(not known, "program", "{} is not known", program)
        self._read()
        left = before - len(members)
        require(len(self.readers) == left, "abort", "{} go on of the program {}", list(self.readers), program)

    def _control(self, op: str) -> None:
        self._controls += 1
        if op == "abort_all":
            for reader in self.readers.values():
                reader.aborted = True
        locked = self.kv.usage().locked
        self.scheduler.receive(ControlMessage(self._controls, op))  # type: ignore[arg-type]
        outbox = self.scheduler.outbox
        replies = [m for m in outbox if isinstance(m, ControlReply) and m.id == self._controls]
        require([(r.id, r.ok) for r in replies] == [(self._controls, True)], "control", "{}: {}", op, replies)
        self._read()
        if op == "abort_all":
            require(not self.readers, "abort", "{} go on after abort_all", list(self.readers))
        elif op == "flush_cache":
            usage = self.kv.usage()
            require(usage.tree == usage.locked <= locked, "flush", "{} were locked, now {}", locked, usage)

    def _operate(self, event: Operate) -> None:
        self._controls += 1
        args = {"name": event.name}
        if event.op == "load_adapter":
            args |= {"path": event.name, "pinned": "true" if event.pinned else "false"}
            self._loads.add(self._controls)
        try:
            self.scheduler.receive(ControlMessage(self._controls, event.op, args))
        except (InvalidRequest, NotFound):  # loaded already, or not loaded
            self._loads.discard(self._controls)
        self._read()

    # -- what clients read

    def _read(self) -> int:
        """Take the outbox; returns how much news there was."""
        news = 0
        for message in self.scheduler.outbox:
            if isinstance(message, ControlReply):
                self._loads.discard(message.id)
            if isinstance(message, Outputs):
                for output in message.items:
                    self._take(output)
                    news += 1
        self.scheduler.outbox.clear()
        return news

    def _take(self, output: Output) -> None:
        if self._trace:
            print(f"step {self.steps}: {output}")
        rid = output.rid
        self.crc = zlib.crc32(repr((rid, output.index, output.tokens, output.finish)).encode(), self.crc)
        reader = self.readers.get(rid)
        if reader is None:
            raise Violation("I9 terminal", f"news of {rid}, which has ended: {output}")
        n = len(reader.tokens)
        require(output.index == n, "I9 log", "{}: index {} after {} tokens", rid, output.index, n)
        reader.tokens += output.tokens
        reader.logprobs += [(p.token, p.logprob) for p in output.logprobs or ()]
        reader.prompt_logprobs += [(p.token, p.logprob) for p in output.prompt_logprobs or ()]
        reader.n_cached = output.n_cached
        self._compare(rid, reader, output)
        if rid != self._arriving:
            self.accounts.took(reader.arrival.request, len(output.tokens))
        if output.finish is not None:
            reader.finish = output.finish
            del self.readers[rid]
            self.ended.append(reader)
            self._judge(rid, reader, output.finish)

    def _compare(self, rid: str, reader: Reader, output: Output) -> None:
        expected, n = reader.expected, len(reader.tokens)
        arrival = reader.arrival
        require(reader.tokens == expected.tokens[:n], "I8 tokens", "{}: {} for {}", rid, reader.tokens, expected.tokens)
        ran = n > 0 or output.n_cached > 0 or output.prompt_logprobs is not None
        shut = self.steps < reader.opens or any(delay < 0 or fails for delay, fails in arrival.gates)
        require(not (ran and shut), "I9 gate", "{} ran before its gate was open", rid)
        if n and arrival.request.constraint is not None:
            compile = self.background.started.get(arrival.request.constraint.text)
            ready = compile is not None and compile.done() and not isinstance(compile.outcome, InvalidRequest)
            require(ready, "I9 grammar", "{} said something before its grammar was there", rid)
        want = expected.logprobs[:n] if arrival.request.params.logprobs is not None else []
        require(reader.logprobs == want, "I8 logprobs", "{}: {} for {}", rid, reader.logprobs, want)
        k = len(reader.prompt_logprobs)
        require(
            reader.prompt_logprobs == expected.prompt_logprobs[:k],
            "I8 prompt logprobs",
            "{}: {} for {}",
            rid,
            reader.prompt_logprobs,
            expected.prompt_logprobs,
        )
        complete = n == 0 or k == len(expected.prompt_logprobs)
        require(complete, "I8 prompt logprobs", "{}: {} before the first token", rid, k)
        n_prompt = len(arrival.request.ids) // 4
        require(output.n_prompt == n_prompt, "I8 usage", "{}: {} prompt tokens", rid, output.n_prompt)
        cached = self.pipeline.cached_len.get(rid + f"/{arrival.seed}", 0)
        require(output.n_cached == cached, "I8 usage", "{}: {} cached tokens, {} used", rid, output.n_cached, cached)

    def _judge(self, rid: str, reader: Reader, finish: Finish) -> None:
        expected, arrival = reader.expected, reader.arrival
        request = arrival.request
        if request.rid != self._arriving and self.accounts.finished(request, finish.message):
            return
        match finish.kind:
            case "abort":
                require(reader.aborted, "I8 finish", "{} was aborted by nobody", rid)
            case "timeout":
                early = reader.deadline - self.now
                require(early <= 0, "I8 finish", "{} timed out {} early", rid, early)
            case "error":
                self._judge_error(rid, arrival, finish)
            case _:
                got = (reader.tokens, finish.kind, finish.matched, len(reader.prompt_logprobs))
                want = (expected.tokens, expected.kind, expected.matched, len(expected.prompt_logprobs))
                require(got == want, "I8 finish", "{}: {} for {}", rid, got, want)
                require(not self._breaks(reader), "I8 grammar", "{} outlived its matcher", rid)

    def _judge_error(self, rid: str, arrival: Arrive, finish: Finish) -> None:
        if finish.status == 400 and "too complex to be enforced" in finish.message:
            reader = self.ended[-1]
            breaks = int(arrival.request.constraint.text.split()[3]) if arrival.request.constraint else -1
            require(0 <= breaks, "I8 grammar", "{}: {}", rid, finish)
            # The token at which it breaks is not sent, unless it was forced and nobody has looked yet.
            most = max(0, breaks - (not self._settings.jump))
            require(len(reader.tokens) <= most or arrival.request.reasoning, "I8 grammar", "{} broke late", rid)
        elif "may be sampled" in finish.message:
            reader = self.ended[-1]
            right = (reader.expected.kind, reader.expected.tokens) == ("refused", reader.tokens)
            require(right, "I8 finish", "{}: refused after {}, not {}", rid, reader.tokens, reader.expected)
        elif "automaton" in finish.message:
            text = arrival.request.constraint.text if arrival.request.constraint else ""
            require(self.background.known_failure(text), "I8 grammar", "{}: its compile did not fail", rid)
        elif "adapter" in finish.message:
            named, pins = arrival.request.namespace.adapter, self._pins
            right = bool(named) and (pins if "pinned" in finish.message else named == BROKEN)
            require(right, "I8 finish", "{}: {} for {}", rid, finish, named)
        elif finish.status == 500:
            owner = f"{rid}/{arrival.seed}"
            blamed = owner in self.pipeline.blamed or self.pipeline.failures.get(owner, 0) >= MAX_FAILURES
            guilty = arrival.fail_at >= 0 and "finite" in finish.message
            require(blamed or guilty, "I8 innocent", "{} was ended for another's failure", rid)
        elif finish.status == 400 and "gate" in finish.message:
            failed = any(delay < 0 or fails for delay, fails in arrival.gates)
            require(failed, "I8 finish", "{}: no gate of it failed", rid)
        else:
            require(finish.status in (400, 429), "I8 finish", "{}: {}", rid, finish)

    @staticmethod
    def _breaks(reader: Reader) -> bool:
        """Whether the answer went on behind the token at which its matcher broke."""
        request = reader.arrival.request
        if request.constraint is None or request.reasoning is not None:
            return False
        breaks = int(request.constraint.text.split()[3])
        return 0 <= breaks < len(reader.tokens)

    # -- what must go on

    def _progress(self, news: int, launched: bool) -> None:
        """Whoever can run gets somewhere; a step that launches and commits nothing happens only in passing."""
        scheduler = self.scheduler
        reqs = scheduler._reqs.values()
        # Whoever waits for its grammar on a row keeps its cells, which others may have to wait for.
        held = any(req.held and req.status is Status.RUNNING for req in reqs)
        runnable = not held and any(not req.held and req.status is not Status.GATED for req in reqs)
        self._quiet = 0 if launched or news or not runnable else self._quiet + 1
        require(self._quiet <= 3, "I10 progress", "no plan and no news in {} steps", self._quiet)
        self._barren = 0 if news or not runnable else self._barren + 1
        most = 3 * CONTEXT + 50
        require(self._barren <= most, "I10 progress", "no news in {} steps", self._barren)
        require(self.steps < 5000, "I10 drain", "no end")

    def _add_up(self) -> None:
        """The counters against what clients saw."""
        stats = self.scheduler.stats()
        ended = len(self.ended)
        counted = stats.finished + stats.rejected
        require(counted == ended, "I8 counters", "{} of {} ended", counted, ended)
        require(stats.rejected == self._rejected, "I8 counters", "{} of {} rejections", stats.rejected, self._rejected)
        require(stats.generated_tokens == sum(len(r.tokens) for r in self.ended), "I8 counters", "generated tokens")
        require(stats.computed_tokens == self.pipeline.planned_tokens, "I8 counters", "computed tokens")
        cached = sum(n for rid, n in self.pipeline.cached_len.items() if not rid.startswith("ahead/"))
        require(stats.cached_tokens == cached, "I8 counters", "{} of {} cached tokens", stats.cached_tokens, cached)
        self._ahead.add_up()
        require(stats.waiting == stats.running == 0, "I8 counters", "gauges")

    # -- seams

    def _rid_of(self, row: int) -> str:
        req = self.scheduler._rows.req(row)
        return f"{req.request.rid}/{req.seed}"

    def _clock(self) -> float:
        self._readings += 1
        require(self._readings < 10_000, "I10 progress", "a step does not come to an end")
        return self.now

    def _draw(self) -> int:
        if self._seed is not None:
            seed, self._seed = self._seed, None
            return seed
        self._draws += 1
        return self._draws * 0x9E3779B97F4A7C15 % (1 << 40)

    def _poison_what_is_freed(self) -> None:
        poisoned = [(self.kv.pages, self.pipeline.poison)]
        if self.kv._window is not None:
            poisoned.append((self.kv._window.pages, self.pipeline.poison_window))
        for pages, poison in poisoned:
            free_pages = pages.free_pages

            def free_and_poison(
                freed: Ints, poison: Callable[[Ints], None] = poison, free_pages: Callable[[Ints], None] = free_pages
            ) -> None:
                poison(freed)
                free_pages(freed)

            pages.free_pages = free_and_poison  # type: ignore[method-assign]


def _stop_matcher(request: Request) -> StopMatcher:
    params = request.params
    return StopMatcher(params.stop, params.stop_regex, params.min_tokens, cast(IncrementalDetokenizer, Letters()))


def run(script: Script) -> int:
    """Run ``script`` to its end; a checksum of all that was planned and said."""
    return Simulation(script).run()
