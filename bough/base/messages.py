"""Typed messages between the API side, which owns text, and the engine, which owns ids.

Everything is msgpack of the tagged structs below; a decoder accepts nothing else. Outputs are a log of
(request, index, token): a reader that joins late, coalesces or fails over can always tell what it has.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from bough.base.config import ScheduleConfig
from bough.base.constraint import Constraint, Reasoning
from bough.base.limits import Limits
from bough.base.params import Pooling, PoolingParams, SamplingParams
from bough.base.plan import Ints
from bough.base.program import Grant, Lease, Program, ProgramInfo, ProgramStats

PROTOCOL = 1
"""Version of this schema; the two ends compare it in :class:`Hello`."""


class Namespace(msgspec.Struct, frozen=True):
    """What besides the tokens determines KV. Different namespaces never share a tree node.

    ``salt`` is the client's; it can never alias the parts that the server sets, because the fields are
    compared one by one.
    """

    model: str = ""
    adapter: str = ""
    tenant: str = ""
    salt: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One sequence to generate: the immutable wire object.

    Attributes:
        rid: unique among the requests in flight.
        ids: prompt token ids, little-endian int32.
        params: sampling options.
        namespace: part of the cache key.
        priority: larger is served earlier, under policies that look at it.
        timeout: seconds from arrival at the engine after which the request ends with an error; None: never.
        constraint: what the answer must look like; None: anything.
        reasoning: how the answer's reasoning ends, where the engine has to know.
        pooling: a vector is wanted and no text; ``params`` mean nothing then.
        program: the program that the request belongs to; None: it is one by itself.
        lease: how long the prompt's KV is wanted.
        unseen: what it generates reaches nobody and counts for nothing, as behind a prompt that is only scored.
    """

    rid: str
    ids: bytes
    params: SamplingParams
    namespace: Namespace = Namespace()
    priority: int = 0
    timeout: float | None = None
    constraint: Constraint | None = None
    reasoning: Reasoning | None = None
    pooling: PoolingParams | None = None
    program: Program | None = None
    lease: Lease | None = None
    unseen: bool = False

    @property
    def prompt(self) -> Ints:
        """The prompt as a read-only int32 array."""
        return np.frombuffer(self.ids, dtype="<i4")


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """What is about to follow an answer, to be computed with what nobody else wants. It has no answer.

    ``ids`` are those of prompt, answer and what its program will append, little-endian int32; ``program`` is its id.
    """

    ids: bytes
    namespace: Namespace
    program: str


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests in whatever state they are; unknown and finished ones are ignored."""

    rids: list[str]


ControlOp = Literal[
    "flush_cache", "abort_all", "load_adapter", "unload_adapter", "list_adapters", "programs", "end_program",
    "cancel_program",
]  # fmt: skip


class Control(msgspec.Struct, frozen=True, tag="control"):
    """An operator's command; answered by a :class:`ControlReply` with the same id.

    ``args`` of load_adapter are name, path and pinned ("true" or "false"), of unload_adapter the name; of programs the
    tenant and, for one alone, the program (the id that its client gave it), of end_program and cancel_program both.
    """

    id: int
    op: ControlOp
    args: dict[str, str] = {}


class Finish(msgspec.Struct, frozen=True):
    """How a request ended; its one terminal event.

    ``kind``: stop (``matched`` is the stop id, string or regex, None for end of sequence),
    length, abort, timeout or error; ``message`` explains the last three, ``param`` names the field to blame, and
    ``code`` is for programs to tell errors apart.
    ``warnings`` name what of a constraint that is not strict was not enforced. ``grant`` says what a request
    of a program, or with a lease, was granted.
    """

    kind: Literal["stop", "length", "abort", "timeout", "error"]
    matched: int | str | None = None
    message: str = ""
    status: int = 200
    param: str | None = None
    code: str | None = None
    warnings: tuple[str, ...] = ()
    grant: Grant | None = None


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """Wire form of :class:`bough.base.plan.PositionLogprobs`."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]
    asked: list[tuple[int, float]]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """News of one request.

    Attributes:
        rid: the request.
        index: how many generated tokens came before ``tokens``.
        tokens: newly committed generated ids.
        n_prompt: tokens of the prompt.
        n_cached: how many of them came from the cache when the request was first admitted.
        finish: set on the last output of the request, and only there.
        logprobs: one per token, where asked.
        prompt_logprobs: newly computed ones, in order of position, where asked.
        pooled: with ``finish``, the vector of a request that wanted one, as little-endian float32.
    """

    rid: str
    index: int
    tokens: list[int]
    n_prompt: int
    n_cached: int
    finish: Finish | None = None
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob] | None = None
    pooled: bytes | None = None


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All news of one step."""

    items: list[Output]


class ControlReply(msgspec.Struct, frozen=True, tag="reply"):
    """Answer to a :class:`Control`."""

    id: int
    ok: bool
    message: str = ""
    info: dict[str, str | int | float | bool | None] = {}
    programs: list[ProgramInfo] = []


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the served model that the API side needs.

    ``labels`` are a classifier's, which does not generate; empty for every other model. ``causal`` is False for an
    encoder, which does not generate either. ``pooling`` is how the model's embeddings are made of its hidden states.
    """

    name: str
    path: str
    architecture: str
    vocab_size: int
    context_length: int
    eos_ids: tuple[int, ...]
    dtype: str
    n_parameters: int
    labels: tuple[str, ...] = ()
    causal: bool = True
    pooling: Pooling = "last"

    @property
    def generates(self) -> bool:
        return self.causal and not self.labels


class CacheKind(msgspec.Struct, frozen=True):
    """Layers whose KV lies in one pool: the "full" ones, or those that see a "window" of so many positions (0: all) or
    a "chunk", those from the last multiple of that number on.

    ``tokens`` are the pool's cells; "latent" layers are full ones that keep one vector for keys and values.
    """

    kind: Literal["full", "window", "chunk", "latent"]
    layers: int
    tokens: int
    bytes_per_token: int
    window: int = 0

    @property
    def bytes(self) -> int:
        """What the pool takes."""
        return self.tokens * self.bytes_per_token


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of an engine, when it is ready to serve. ``kernels`` names those in use, for people."""

    protocol: int
    pid: int
    model: ModelInfo
    pool_tokens: int
    page_size: int
    limits: Limits
    schedule: ScheduleConfig = ScheduleConfig()
    cache: tuple[CacheKind, ...] = ()
    kernels: str = ""


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Waits for who was just answered that have ended, those of them in which somebody came, and seconds of all."""

    ended: int = 0
    worth: int = 0
    seconds: float = 0.0


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Heartbeat of the engine, sent a few times a second and after busy steps; counters never fall.

    ``step_seconds``, ``device_seconds`` and ``step_tokens`` list the steps since the previous heartbeat.
    """

    steps: int
    waiting: int
    running: int
    pool_tokens: int
    free_tokens: int
    tree_tokens: int
    locked_tokens: int
    window_tokens: int = 0
    free_window_tokens: int = 0
    idle_window_tokens: int = 0
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    evicted_tokens: int
    retracted: int
    finished: int
    aborted: int
    rejected: int
    bad_messages: int
    step_seconds: list[float]
    device_seconds: list[float]
    step_tokens: list[int]
    waits: Waits = Waits()
    programs: ProgramStats = ProgramStats()


ToEngine = Request | Prefetch | Abort | Control
FromEngine = Hello | Outputs | ControlReply | Stats

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
