"""The scheduler: one loop, read top to bottom in :meth:`Scheduler.step`."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import structs

from bough.base.config import ScheduleConfig
from bough.base.errors import BoughError, DeviceLost, InvalidRequest, Overloaded
from bough.base.limits import Limits
from bough.base.messages import (
    Abort,
    Control,
    ControlReply,
    Finish,
    FromEngine,
    ModelInfo,
    Output,
    Outputs,
    Prefetch,
    Request,
    Stats,
    ToEngine,
)
from bough.base.params import SamplingParams
from bough.base.plan import AdapterDevice, Executor, Masks, Pending
from bough.base.validate import validate_request
from bough.kv.manager import KVManager
from bough.scheduler.adapters import Adapters
from bough.scheduler.anticipation import Anticipation
from bough.scheduler.background import Background, made
from bough.scheduler.commit import Committer, terminal
from bough.scheduler.constraints import Compiler, Constraints, reason_of
from bough.scheduler.costs import Timings
from bough.scheduler.deadlines import Deadlines
from bough.scheduler.gates import Gate, GateSet
from bough.scheduler.planner import Flight, Planner
from bough.scheduler.policy import POLICIES
from bough.scheduler.programs import Programs
from bough.scheduler.queue import WaitQueue
from bough.scheduler.req import Req, Status, end_ids, initial_logprob_from
from bough.scheduler.rows import Rows
from bough.text.stop import StopMatcher

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""A request that took part in this many failed forwards ends with an error even if none was proven its fault."""


class Scheduler:
    """Owns every request from arrival to its terminal event.

    It has no clock, no randomness and no device of its own: ``clock`` (monotonic seconds), ``draw`` (63-bit
    integers) and ``executor`` are handed in, so the same object serves, is simulated and is tested.

    Args:
        config: policy, depth and budgets, resolved; without ``mixed_tokens`` (old recordings) all steps have the same.
        limits: bounds on requests and on the queue.
        model: vocabulary, context length and end-of-sequence ids.
        stop_matcher: builds the matcher of a request's stop strings; raises InvalidRequest for a bad pattern.
        gates: asynchronous preconditions of admission.
        compiler: compiles constraints in the background; without one they are refused.
        adapters: reads and holds adapters; without it they are refused.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        limits: Limits,
        model: ModelInfo,
        kv: KVManager,
        executor: Executor[Any],
        clock: Callable[[], float],
        draw: Callable[[], int],
        stop_matcher: Callable[[Request], StopMatcher],
        gates: tuple[Gate, ...] = (),
        compiler: Compiler | None = None,
        adapters: AdapterDevice | None = None,
    ) -> None:
        assert config.max_running is not None and config.step_tokens is not None and config.depth is not None
        assert config.step_tokens >= config.max_running
        self._limits = limits
        self._model = model
        self._kv = kv
        self._executor = executor
        self._clock = clock
        self._draw = draw
        self._stop_matcher = stop_matcher
        self._depth = config.depth
        self._rows = Rows(config.max_running, model.context_length)
        self._programs = Programs(kv.capacity, kv.claims, config.max_wait)
        policy = POLICIES.get(config.policy)(kv.waiting, draw, self._programs)
        self._queue = WaitQueue(policy, kv.waiting, config.max_wait)
        self._adapters = Adapters(adapters)
        self._background = Background(kv, self._programs, self._adapters)
        self._planner = Planner(
            kv,
            self._rows,
            self._queue,
            self._programs,
            self._background,
            config.step_tokens,
            config.mixed_tokens or config.step_tokens,
            model.eos_ids,
            clock,
            whole=not model.causal,
        )
        self._constraints = Constraints(
            compiler, self._rows, self._queue, model.eos_ids, model.vocab_size, config.jump_forward == "on", clock
        )
        self._gates = GateSet((*gates, self._adapters, self._constraints))
        self._committer = Committer(self._rows, self._planner, self._constraints)
        self._forward: tuple[Flight, Any] | None = None  # launched, and yet to be sampled
        self._at_gates = False
        self._in_flight: deque[tuple[Flight, Pending]] = deque()
        self._reqs: dict[str, Req] = {}
        self._deadlines = Deadlines(self._reqs)
        self._arrivals = self._steps = self._aborted = self._rejected = self._ended_early = 0
        self._timings = Timings([], [], [])
        self._anticipation = Anticipation(self._programs.costs, clock())
        self._news: list[Output] = []
        self.outbox: list[FromEngine] = []
        """Messages for the API side, in order; the driver takes them."""

    # -- the loop --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One turn: plan, launch, and commit what is done. Blocks only on the device."""
        began = self._clock()
        self._programs.tick(began)
        for req in self._deadlines.pop_due(began):
            self._end(req, Finish("timeout", message="the request ran past its timeout", status=408))
        self._open_gates()
        if self._in_flight and self._constraints.jumpy():
            self._commit_all()
        flight = self._planner.next(settled=not self._in_flight)
        if flight is not None:
            self._launch(flight)
        while len(self._in_flight) > self._depth or (flight is None and self._in_flight):
            self._commit(*self._in_flight.popleft())
        self._at_gates = flight is None and not self._in_flight and bool(self._reqs or self._adapters.busy)
        self._send()
        self._timings.step.append(self._clock() - began)

    def _launch(self, flight: Flight) -> None:
        """Launch ``flight`` without waiting for it; what its masks depend on is committed behind its forward."""
        self._forward = flight, self._executor.forward(flight.plan)
        concerned, masks = self._constraints.concern(flight), None
        if concerned is not None:
            self._commit_all()
            if self._forward is None:
                return  # it was launched behind a step that failed
            masks, failed = self._constraints.masks(flight, concerned)
            for req, finish in failed:
                self._end(req, finish)
        self._sample(masks)

    def _sample(self, masks: Masks | None) -> None:
        assert self._forward is not None
        flight, forward = self._forward
        self._forward = None
        self._in_flight.append((flight, self._executor.sample(forward, masks)))

    @property
    def idle(self) -> bool:
        """Nothing runs, waits or is in flight."""
        return not (self._reqs or self._in_flight or self._background) and not self._adapters.busy

    @property
    def stalled(self) -> bool:
        """Whoever is here waits for something outside, such as a compile."""
        return self._at_gates

    def patience(self) -> float:
        """Seconds that the next step is to wait for a request, or 0; see :meth:`Anticipation.left`. What is only looked
        at by steps, such as deadlines, is so much later."""
        return self._anticipation.left(
            self._clock(), lambda: not (len(self._gates) or self._adapters.busy) and self._planner.open()
        )

    def _commit_all(self) -> None:
        while self._in_flight:
            self._commit(*self._in_flight.popleft())

    def _commit(self, flight: Flight, pending: Pending) -> None:
        try:
            result = pending.result()
        except DeviceLost:
            raise
        except Exception:
            log.exception("step %d failed", flight.plan.step)
            self._recover(flight)
            return
        self._steps += 1
        self._timings.device.append(result.seconds)
        self._timings.tokens.append(len(flight.plan.tokens))
        self._programs.costs.step(result.seconds, len(flight.plan.tokens), len(flight.reqs))
        self._news += self._committer.commit(flight, result)
        self._forget(flight)

    def _forget(self, flight: Flight) -> None:
        for req in flight.reqs:
            # The client may have used the id again since its request was aborted in flight.
            if req.status is Status.FINISHED and self._reqs.get(req.request.rid) is req:
                self._drop(req)
                self._anticipation.answered(req.request.program)

    def _drop(self, req: Req) -> None:
        """``req`` has had its terminal event."""
        if self._reqs.pop(req.request.rid, None) is not None:
            self._programs.ended(req)

    # -- messages --------------------------------------------------------------------------------------

    def receive(self, message: ToEngine) -> None:
        """Take one message; the answer goes to the outbox. A request never raises; commands raise what refuses them."""
        match message:
            case Request():
                try:
                    self._arrive(message)
                except BoughError as error:
                    self._refuse(message, error)
                except Exception as error:
                    log.exception("a request could not be taken in")
                    self._refuse(message, BoughError(f"the engine could not take the request: {type(error).__name__}"))
            case Prefetch():
                self._prefetch(message)
            case Abort():
                self._abort((self._reqs[rid] for rid in message.rids if rid in self._reqs), "the request was aborted")
            case Control():
                self._control(message)
        self._send()

    def _arrive(self, request: Request) -> None:
        if request.rid in self._reqs:
            raise InvalidRequest(f"a request with id {request.rid!r} is already in flight", param="rid")
        if len(self._queue) + len(self._gates) >= self._limits.queue_requests or (
            self._queue.tokens + self._gates.tokens + len(request.ids) // 4 > self._limits.queue_tokens
        ):
            raise Overloaded("the queue is full", retry_after=1.0)
        model = self._model
        validate_request(
            request,
            self._limits,
            model.vocab_size,
            model.context_length,
            generates=model.generates,
            classifies=bool(model.labels),
        )
        now = self._clock()
        self._programs.tick(now)
        self._programs.check(request)
        params = request.params
        self._arrivals += 1
        req = Req(
            request=request,
            order=self._arrivals,
            arrival=now,
            deadline=now + request.timeout if request.timeout is not None else float("inf"),
            seed=params.seed if params.seed is not None else self._draw(),
            limit=self._limit(request),
            stop=self._stop_matcher(request) if params.stop or params.stop_regex else None,
            ids=request.prompt,
            logprob_from=initial_logprob_from(request),
            stops=frozenset((*end_ids(request, model.eos_ids), *params.stop_token_ids)),
        )
        if self._background.overtaken(request):
            self._planner.stop_background()
        held = self._gates.hold(req)
        req.program = self._programs.arrive(req)
        if req.program is not None and self._programs.bounded is req.program:
            self._rows.watch(req.program.reqs.values())
        if held:
            req.status = Status.GATED
        else:
            self._queue.push(req)
        self._reqs[request.rid] = req
        self._anticipation.arrived()
        if request.timeout is not None:
            self._deadlines.push(req)

    def _prefetch(self, message: Prefetch) -> None:
        """Compute what a program will append, some time. Raises InvalidRequest for what no request could be."""
        state = self._programs.find(message.namespace.tenant, message.program)
        if state is None or not self._kv.keeps:
            return
        n, model = len(message.ids) // 4, self._model
        request = Request(
            rid="ahead",
            ids=message.ids,
            params=SamplingParams(max_tokens=0, prompt_logprobs=0, logprob_start=n),
            namespace=message.namespace,
        )
        validate_request(request, self._limits, model.vocab_size, model.context_length, generates=model.generates)
        if n <= self._kv.capacity:
            self._arrivals += 1
            req = made(request, self._arrivals, self._clock(), self._draw())
            req.program = state
            self._background.push(req)

    def _limit(self, request: Request) -> int:
        """Most ids the request may have; refuses what could not run even alone."""
        n_prompt, asked = len(request.ids) // 4, 0 if request.pooling is not None else request.params.max_tokens
        most = min(self._model.context_length, self._kv.capacity)
        if n_prompt + (1 if asked is None else asked) > most:
            raise InvalidRequest(
                f"the request needs {n_prompt} + {asked or 1} tokens of KV, more than the pool's {most}",
                param="max_tokens",
            )
        return most if asked is None else n_prompt + asked

    def _refuse(self, request: Request, error: BoughError) -> None:
        self._rejected += 1
        finish = Finish("error", message=str(error), status=error.status, param=error.param, code=error.code)
        self._news.append(Output(request.rid, 0, [], len(request.ids) // 4, 0, finish))

    def _end_program(self, message: Control, tenant: str, program: str) -> None:
        if message.op == "end_program":
            self._programs.close(self._programs.known(tenant, program))
        else:
            self._abort(self._programs.cancel(tenant, program), "the program was cancelled")
        self.outbox.append(ControlReply(message.id, True))

    def _control(self, message: Control) -> None:
        self._programs.tick(self._clock())
        match message.op:
            case "flush_cache":
                self._stop_background()
                freed, kept = self._kv.flush(), self._kv.usage().locked
                text = f"{freed} tokens were dropped from the cache"
                self.outbox.append(ControlReply(message.id, True, text, {"dropped": freed, "kept": kept}))
            case "abort_all":
                self._stop_background()
                self._abort(list(self._reqs.values()), "all requests were aborted")
                self.outbox.append(ControlReply(message.id, True))
            case "load_adapter":
                args = message.args
                self._adapters.load(message.id, args["name"], args["path"], args["pinned"] == "true")
            case "unload_adapter":
                self._adapters.unload(message.args["name"])
                self.outbox.append(ControlReply(message.id, True))
            case "list_adapters":
                self.outbox.append(ControlReply(message.id, True, info={**self._adapters.names()}))
            case "programs":
                shown = self._programs.describe(message.args["tenant"], message.args.get("program"))
                self.outbox.append(ControlReply(message.id, True, programs=shown))
            case "end_program" | "cancel_program":
                self._end_program(message, message.args["tenant"], message.args["program"])

    def _send(self) -> None:
        if self._programs.grants:
            grants, self._programs.grants = self._programs.grants, {}
            self._news = [
                structs.replace(o, finish=structs.replace(o.finish, grant=grants[o.rid]))
                if o.finish is not None and o.rid in grants
                else o
                for o in self._news
            ]
        if self._news:
            self.outbox.append(Outputs(self._news))
            self._news = []
        self.outbox += self._adapters.replies
        self._adapters.replies.clear()

    def _stop_background(self) -> None:
        """Nothing runs ahead any more."""
        self._background.clear()
        self._planner.stop_background()

    # -- ends other than by commit -------------------------------------------------------------------------

    def _end(self, req: Req, finish: Finish) -> None:
        """End ``req`` in whatever state it is; its one terminal event."""
        if req.status is Status.RUNNING:
            self._news.append(self._committer.end(req, finish))
        elif req.status is not Status.FINISHED:
            if req.status is Status.GATED:
                self._gates.cancel(req)
            elif req in self._planner.suspects:
                self._planner.suspects.remove(req)
            else:
                self._queue.remove(req)
            req.status = Status.FINISHED
            self._ended_early += 1
            self._news.append(terminal(req, finish))
        self._drop(req)

    def _abort(self, reqs: Iterable[Req], message: str) -> None:
        for req in reqs:
            self._end(req, Finish("abort", message=message))
            self._aborted += 1

    def _open_gates(self) -> None:
        self._adapters.advance()
        self._end_failed(self._constraints.settle())  # before its gate is looked at once more
        ready, failed = self._gates.poll()
        for req in ready:
            req.status = Status.WAITING
            self._queue.push(req)
        self._end_failed(failed)

    def _end_failed(self, failed: list[tuple[Req, Exception]]) -> None:
        for req, error in failed:
            message, status, param = reason_of(error)
            self._end(req, Finish("error", message=message, status=status, param=param))

    def _recover(self, flight: Flight) -> None:
        """A shared forward failed: nothing that it or a later plan in flight wrote can be trusted.

        Every request of these plans gives its row back, youngest first, so that whoever reads cells that
        were never written leaves before the one who should have written them. Then each runs its next step
        alone: the one that fails alone is ended, the others go on with the same tokens as if nothing happened.
        """
        if self._forward is not None:
            self._sample(None)
        affected = {req.order: req for req in flight.reqs if req.row >= 0}
        alone = len(affected) == 1
        while self._in_flight:
            later, pending = self._in_flight.popleft()
            affected |= {req.order: req for req in later.reqs if req.row >= 0}
            try:
                pending.result()
            except DeviceLost:
                raise
            except Exception as error:
                log.warning("step %d, launched behind the failed one, failed too: %s", later.plan.step, error)
        rows = self._rows
        by_row = {req.row: req for req in affected.values()}
        suspects: list[Req] = []
        for row in reversed([row for row in rows.running.tolist() if row in by_row]):
            req = by_row[row]
            rows.in_flight[row] = 0
            self._planner.discard(row, int(rows.computed[row]))
            if req.background:
                self._background.stopped(req)
                continue
            if req.status is Status.FINISHED:
                continue
            req.failures += 1
            if req.failures >= MAX_FAILURES or (alone and req in flight.reqs):
                req.status = Status.FINISHED
                self._ended_early += 1
                self._drop(req)
                finish = Finish("error", message="the engine failed while computing this request", status=500)
                self._news.append(terminal(req, finish))
            else:
                req.status = Status.WAITING
                suspects.append(req)
        self._planner.suspects.extendleft(suspects)

    # -- what can be seen ------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Counters and gauges; the timings are those since the previous call."""
        usage, planner, timings = self._kv.usage(), self._planner, self._timings
        self._timings = Timings([], [], [])
        return Stats(
            steps=self._steps,
            waiting=len(self._queue) + len(self._gates) + len(planner.suspects),
            running=self._programs.rows,
            pool_tokens=usage.total,
            free_tokens=usage.free,
            tree_tokens=usage.tree,
            locked_tokens=usage.locked,
            window_tokens=usage.window,
            free_window_tokens=usage.window_free,
            idle_window_tokens=usage.window_idle,
            prompt_tokens=planner.prompt_tokens,
            cached_tokens=planner.cached_tokens,
            computed_tokens=planner.computed_tokens,
            generated_tokens=self._committer.generated_tokens,
            evicted_tokens=usage.evicted,
            retracted=planner.retracted,
            finished=self._committer.finished + self._ended_early,
            aborted=self._aborted,
            rejected=self._rejected,
            bad_messages=0,
            step_seconds=timings.step,
            device_seconds=timings.device,
            step_tokens=timings.tokens,
            waits=self._anticipation.waits,
            programs=self._programs.stats(),
        )

    def check(self) -> None:
        """Assert the invariants of the KV pool and of the rows; cheap enough for idle moments."""
        self._kv.check()
        self._adapters.check()
        rows = self._rows
        for row in rows.running.tolist():
            req = rows.req(row)
            assert req.row == row and (req.status is Status.RUNNING or rows.in_flight[row] > 0)
            assert rows.computed[row] <= rows.planned[row] <= rows.n_ids[row] + rows.ahead[row]
        if self.idle:
            assert not len(rows) and not len(self._queue) and not len(self._gates)
