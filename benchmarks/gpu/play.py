"""Requests played through the engine's own scheduler, in this process, and what came of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.gpu.interpreted import interpreted
from bough.base.config import Config, DeviceConfig, KVConfig, ModelConfig, ScheduleConfig
from bough.base.constraint import Constraint
from bough.base.messages import Outputs, Request
from bough.base.params import SamplingParams
from bough.base.plan import Index, Ints, Masks, Pending, SharedPrefix, StepPlan, StepResult
from bough.engine.build import EngineCore, build
from bough.engine.executor import WorkerExecutor
from bough.kv.manager import KVManager
from bough.scheduler.loop import Scheduler

LOOK = 64
"""Steps between two looks at the engine's statistics."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(slots=True)
class Ask:
    """A request, and what its client asks next, given its tokens."""

    prompt: Ints
    n_out: int
    params: SamplingParams = GREEDY
    constraint: Constraint | None = None
    then: Callable[[list[int]], Ask | None] = lambda tokens: None


@dataclass(slots=True)
class Told:
    """One answer. Seconds are of ``time.perf_counter``."""

    ask: Ask
    began: float
    tokens: list[int] = field(default_factory=list)
    stamps: list[float] = field(default_factory=list)
    n_cached: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Features:
    """What may be turned off, to see what it is worth."""

    radix: bool = True
    cascade: bool = True
    overlap: bool = True
    jump: bool = True
    step_tokens: int | None = None


ALL = Features()


class Alone(KVManager):
    """Tells no plan which rows share a prefix."""

    def shared(self, rows: Index, start: Ints) -> tuple[SharedPrefix, ...]:
        return ()


class Watched:
    """An executor, and what the device's own events say of the steps of one scheduler."""

    def __init__(self, executor: WorkerExecutor) -> None:
        self._executor = executor
        self.busy = self.idle = 0.0
        """Seconds, from the end of the first step on."""
        self._first = True

    def forward(self, plan: StepPlan) -> Any:
        return self._executor.forward(plan)

    def sample(self, forward: Any, masks: Masks | None) -> Watching:
        return Watching(self._executor.sample(forward, masks), self)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def saw(self, result: StepResult) -> None:
        if not self._first:
            self.busy, self.idle = self.busy + result.seconds, self.idle + result.idle
        self._first = False


@dataclass(frozen=True, slots=True)
class Watching:
    """A step in flight."""

    step: Pending
    watched: Watched

    def result(self) -> StepResult:
        result = self.step.result()
        self.watched.saw(result)
        return result


@dataclass(frozen=True, slots=True)
class Played:
    """What a workload took.

    Attributes:
        told: the answers, in the order in which they were asked for.
        seconds: of the wall.
        steps: of the engine, and ``device_seconds`` what the device took for them by its own events.
        stalled: share of the time after the first step for which the device had nothing to do, by its own events.
        host_seconds: median of the host's part of a step, waiting included.
    """

    told: list[Told]
    seconds: float
    steps: int
    device_seconds: float
    stalled: float
    host_seconds: float

    @property
    def generated(self) -> int:
        return sum(len(told.tokens) for told in self.told)

    @property
    def errors(self) -> list[str]:
        return [told.error for told in self.told if told.error]

    def figures(self) -> dict[str, Any]:
        """For the report."""
        first = [told.stamps[0] - told.began for told in self.told if told.stamps]
        cached = sum(told.n_cached for told in self.told)
        return {
            "seconds": round(self.seconds, 4),
            "generated_per_s": round(self.generated / self.seconds, 1),
            "total_per_s": round((self.generated + sum(len(t.ask.prompt) for t in self.told)) / self.seconds, 1),
            "ttft_ms_p50": round(1e3 * statistics.median(first), 2) if first else None,
            "cached_tokens": cached,
            "steps": self.steps,
            "step_ms": round(1e3 * self.host_seconds, 3),
            "gpu_busy": round(self.device_seconds / self.seconds, 4),
            "gpu_stalled": round(self.stalled, 4),
            "errors": len(self.errors),
        }


class Engine:
    """A built engine, of which schedulers with other features can be had."""

    def __init__(
        self, model: Path, device: Literal["cpu", "cuda"], tiny: bool, *, rows: int, pool_tokens: int,
        dtype: Literal["bfloat16", "float32"] = "bfloat16", quantize: Literal["none", "fp8"] = "none",
        kv_dtype: Literal["auto", "fp8"] = "auto", graphs: bool = True,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        began = time.perf_counter()
        self.config = Config(
            model=ModelConfig(path=str(model), load_format="dummy", dtype=dtype, quantize=quantize),
            kv=KVConfig(pool_tokens=pool_tokens, kv_dtype=kv_dtype),
            schedule=ScheduleConfig(max_running=rows, step_tokens=64 if tiny else 8192, depth=1),
            device=DeviceConfig(device=device, graphs="on" if graphs else "off"),
        )
        with interpreted() if device == "cpu" else nullcontext():
            self.core: EngineCore = build(self.config)
        self.built_seconds = time.perf_counter() - began

    def close(self) -> None:
        """Give the device's memory back."""
        self.core.close()
        del self.core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def scheduler(self, features: Features, executor: Watched) -> Scheduler:
        """A new one, with an empty cache, over the same worker."""
        core = self.core
        schedule = replace(
            core.hello.schedule,
            depth=1 if features.overlap else 0,
            jump_forward="on" if features.jump else "off",
            step_tokens=features.step_tokens or core.hello.schedule.step_tokens,
        )
        kind = KVManager if features.cascade else Alone
        pool = core.executor.built.pool_tokens
        assert schedule.max_running is not None
        kv = kind(
            pool, 1, schedule.max_running, core.hello.model.context_length, "lru", "radix" if features.radix else "none"
        )
        return Scheduler(
            schedule, self.config.limits, core.hello.model, kv, executor,
            clock=time.monotonic, draw=lambda: 1, stop_matcher=_no_stops, compiler=core.grammar.compiler,
        )  # fmt: skip

    def play(self, asks: Sequence[Ask], features: Features = ALL) -> Played:
        """All of ``asks`` at once, and whatever follows them."""
        executor = Watched(self.core.executor)
        scheduler = self.scheduler(features, executor)
        told: dict[str, Told] = {}
        waiting = list(asks)
        turns, device, host = 0, 0.0, [0.0]
        began = time.perf_counter()
        while waiting or not scheduler.idle:
            for ask in waiting:
                rid = f"r{len(told)}"
                told[rid] = Told(ask, time.perf_counter())
                scheduler.receive(_request(rid, ask))
            scheduler.step()
            waiting = _read(scheduler, told)
            turns += 1
            if turns % LOOK == 0 or (scheduler.idle and not waiting):
                stats = scheduler.stats()
                device += sum(stats.device_seconds)
                host += stats.step_seconds
        seconds = time.perf_counter() - began
        stalled = executor.idle / max(executor.idle + executor.busy, 1e-9)
        return Played(list(told.values()), seconds, stats.steps, device, stalled, statistics.median(host))


def _read(scheduler: Scheduler, told: dict[str, Told]) -> list[Ask]:
    """Enter the news, and what clients ask upon them."""
    now = time.perf_counter()
    following = []
    for message in scheduler.outbox:
        for output in message.items if isinstance(message, Outputs) else ():
            answer = told[output.rid]
            answer.tokens += output.tokens
            answer.stamps += [now] * len(output.tokens)
            answer.n_cached = output.n_cached
            if output.finish is not None and output.finish.kind == "error":
                answer.error = output.finish.message
            elif output.finish is not None and (ask := answer.ask.then(answer.tokens)) is not None:
                following.append(ask)
    scheduler.outbox.clear()
    return following


def random_ids(rng: np.random.Generator, n: int, vocab_size: int) -> Ints:
    """[n] ids; 0 ends texts."""
    return rng.integers(1, vocab_size, n, dtype=np.int32)


def _request(rid: str, ask: Ask) -> Request:
    params = SamplingParams(
        **{**{name: getattr(ask.params, name) for name in ask.params.__struct_fields__}, "max_tokens": ask.n_out}
    )
    return Request(rid=rid, ids=ask.prompt.astype("<i4").tobytes(), params=params, constraint=ask.constraint)


def _no_stops(request: Request) -> Any:
    raise ValueError("no stop strings here")
