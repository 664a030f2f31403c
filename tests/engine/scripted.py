"""A scheduler whose tokens are a function of the prompt, and a core around it: the contract, without a model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import numpy as np

from bough.base.config import Config
from bough.base.errors import ConfigError, DeviceLost, InvalidRequest
from bough.base.limits import DEFAULT_LIMITS, Limits
from bough.base.messages import (
    PROTOCOL,
    Abort,
    Control,
    ControlReply,
    Finish,
    FromEngine,
    Hello,
    ModelInfo,
    Output,
    Outputs,
    Request,
    Stats,
    ToEngine,
)
from bough.base.params import SamplingParams

VOCAB = 1000
CONTEXT = 1 << 20
RAISE_IN_RECEIVE, REFUSE, RAISE_IN_STEP, HOLD, LOSE_DEVICE = 1, 2, 3, 4, 997
"""First prompt ids that make the scheduler misbehave; HOLD is never served."""


LENGTH = Finish("length")


def token(prompt: Sequence[int], i: int) -> int:
    """The i-th generated token after ``prompt``."""
    return (sum(prompt) * 31 + i * 7 + i // 5) % VOCAB


def expected(prompt: Sequence[int], n: int) -> list[int]:
    return [token(prompt, i) for i in range(n)]


def request(rid: str, prompt: Sequence[int], max_tokens: int | None = None) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(rid=rid, ids=np.array(prompt, dtype="<i4").tobytes(), params=params)


class ScriptedScheduler:
    """One token per request and step.

    ``script``: the ids that every request generates, instead of the rule, and ``ending``: how it ends then.
    """

    def __init__(self, step_seconds: float = 0.0, script: Sequence[int] | None = None, ending: Finish = LENGTH) -> None:
        self.outbox: list[FromEngine] = []
        self.requests: dict[str, Request] = {}
        self.aborted: list[int] = []  # last prompt ids
        self.seeds: list[int | None] = []
        self.steps = 0
        self.moments: list[float] = []  # for which it waits before a step
        self.checks = 0
        self._sent: dict[str, int] = {}
        self._step_seconds = step_seconds
        self._script = script
        self._ending = ending

    @property
    def idle(self) -> bool:
        return not self.requests

    @property
    def stalled(self) -> bool:
        return False

    def patience(self) -> float:
        return self.moments.pop(0) if self.moments else 0.0

    def receive(self, message: ToEngine) -> None:
        match message:
            case Request():
                self._arrive(message)
            case Abort():
                for rid in message.rids:
                    if rid in self.requests:
                        self.aborted.append(self.requests[rid].prompt.tolist()[-1])
                        self._put(rid, [], Finish("abort", message="aborted"))
            case Control():
                self.outbox.append(ControlReply(message.id, True, message.op, {"steps": self.steps}))

    def _arrive(self, request: Request) -> None:
        first = request.prompt[0]
        if first == RAISE_IN_RECEIVE:
            raise RuntimeError("planted")
        if first == REFUSE:
            raise InvalidRequest("refused")
        self.requests[request.rid] = request
        self._sent[request.rid] = 0
        self.seeds.append(request.params.seed)

    def step(self) -> None:
        self.steps += 1
        time.sleep(self._step_seconds)  # the device at work
        for rid, request in list(self.requests.items()):
            prompt = request.prompt.tolist()
            if prompt[0] == RAISE_IN_STEP:
                raise RuntimeError("planted in step")
            if prompt[0] == LOSE_DEVICE:
                raise DeviceLost("the GPU cannot be used any more: planted") from RuntimeError("CUDA error: planted")
            if prompt[0] == HOLD:
                continue
            i = self._sent[rid]
            if self._script is not None:
                ids, most = [self._script[i]], len(self._script)
            else:
                ids, most = [token(prompt, i)], CONTEXT
            limit = min(most, most if request.params.max_tokens is None else request.params.max_tokens)
            self._put(rid, ids, None if i + 1 < limit else self._ending if i + 1 == most else LENGTH)

    def _put(self, rid: str, ids: list[int], finish: Finish | None) -> None:
        index = self._sent[rid]
        self._sent[rid] += len(ids)
        output = Output(rid, index, ids, len(self.requests[rid].ids) // 4, 0, finish)
        if self.outbox and isinstance(self.outbox[-1], Outputs):
            self.outbox[-1].items.append(output)
        else:
            self.outbox.append(Outputs([output]))
        if finish is not None:
            del self.requests[rid], self._sent[rid]

    def stats(self) -> Stats:
        names = (name for name, kind in Stats.__annotations__.items() if kind == "int")
        counters = dict.fromkeys(names, 0) | {"steps": self.steps, "running": len(self.requests)}
        return Stats(**counters, step_seconds=[], device_seconds=[], step_tokens=[])

    def check(self) -> None:
        self.checks += 1


class ScriptedCore:
    def __init__(
        self,
        scheduler: ScriptedScheduler | None = None,
        limits: Limits = DEFAULT_LIMITS,
        path: str = "",
        vocab_size: int = VOCAB,
    ) -> None:
        self.scheduler = scheduler or ScriptedScheduler()
        self.closed = False
        self.tasks = 0
        """What it has to prepare."""
        self.kept_up: list[int] = []
        """Messages that waited to be sent, whenever it could keep up."""
        model = ModelInfo(
            name="scripted",
            path=path,
            architecture="none",
            vocab_size=vocab_size,
            context_length=CONTEXT,
            eos_ids=(0,),
            dtype="none",
            n_parameters=0,
        )
        self.hello = Hello(PROTOCOL, os.getpid(), model, 1 << 20, 1, limits)

    def keep_up(self) -> None:
        self.kept_up.append(len(self.scheduler.outbox))

    def prepare(self) -> bool:
        if not self.tasks:
            return False
        self.tasks -= 1
        return True

    def close(self) -> None:
        self.closed = True


def build(config: Config) -> ScriptedCore:
    """For the process tests: the model's path says how the engine behaves."""
    if config.model.path == "broken":
        raise ConfigError("the model is\n broken")
    if config.model.path == "dies":
        os._exit(3)
    return ScriptedCore(ScriptedScheduler(step_seconds=0.002))
