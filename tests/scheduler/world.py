"""A small world around the real scheduler: fake device, fake clock, readers that collect outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from bough.base.config import ScheduleConfig
from bough.base.limits import DEFAULT_LIMITS, Limits
from bough.base.messages import Finish, Logprob, ModelInfo, Namespace, Outputs, Request
from bough.base.params import SamplingParams
from bough.kv.manager import KVManager
from bough.scheduler.loop import Scheduler
from bough.sim.clocked import Cost
from bough.sim.device import FREE, FakeDevice

VOCAB = 97
DEFAULT_NAMESPACE = Namespace()
MODEL = ModelInfo(
    name="fake",
    path="",
    architecture="fake",
    vocab_size=VOCAB,
    context_length=512,
    eos_ids=(0,),
    dtype="none",
    n_parameters=0,
)


@dataclass
class Reader:
    """Everything that one request was sent."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    finish: Finish | None = None
    n_cached: int = 0


def request(
    rid: str,
    prompt: Iterable[int],
    namespace: Namespace = DEFAULT_NAMESPACE,
    priority: int = 0,
    timeout: float | None = None,
    **params: object,
) -> Request:
    params = {"temperature": 0.0, **params}
    return Request(
        rid=rid,
        ids=np.array(list(prompt), dtype="<i4").tobytes(),
        params=SamplingParams(**params),  # type: ignore[arg-type]
        namespace=namespace,
        priority=priority,
        timeout=timeout,
    )


class World:
    """The scheduler with everything it needs, and what it said."""

    def __init__(
        self,
        cells: int = 4096,
        page_size: int = 1,
        eviction: str = "lru",
        cache: str = "radix",
        limits: Limits = DEFAULT_LIMITS,
        model: ModelInfo = MODEL,
        cost: Cost = FREE,
        **schedule: object,
    ) -> None:
        options = {"max_running": 16, "step_tokens": 64, "depth": 0, **schedule}
        config = replace(ScheduleConfig(), **options)  # type: ignore[arg-type]
        self.now = 0.0
        self.kv = KVManager(
            n_tokens=cells,
            page_size=page_size,
            n_rows=config.max_running,
            max_len=model.context_length,
            eviction=eviction,
            cache=cache,
        )
        self.device = FakeDevice(cells, config.max_running or 0, model.context_length, model.vocab_size, cost=cost)
        self.scheduler = Scheduler(
            config,
            limits,
            model,
            self.kv,
            self.device,
            clock=lambda: self.now,
            draw=iter(range(1, 1 << 40)).__next__,
            stop_matcher=lambda params: (_ for _ in ()).throw(AssertionError("no stop strings here")),
        )
        self.readers: dict[str, Reader] = {}

    def submit(self, *requests: Request) -> None:
        for r in requests:
            self.readers[r.rid] = Reader()
            self.scheduler.receive(r)
        self.drain()

    def step(self) -> None:
        self.scheduler.step()
        self.now += 0.01
        self.drain()
        self.scheduler.check()

    def run(self, most: int = 10_000) -> dict[str, Reader]:
        steps = 0
        while not self.scheduler.idle:
            self.step()
            steps += 1
            assert steps < most, "no end"
        return self.readers

    def drain(self) -> None:
        for message in self.scheduler.outbox:
            if isinstance(message, Outputs):
                for output in message.items:
                    reader = self.readers[output.rid]
                    assert reader.finish is None, "news after the terminal event"
                    assert output.index == len(reader.tokens)
                    reader.tokens += output.tokens
                    reader.logprobs += output.logprobs or []
                    reader.prompt_logprobs += output.prompt_logprobs or []
                    reader.finish = output.finish
                    reader.n_cached = output.n_cached
        self.scheduler.outbox.clear()
