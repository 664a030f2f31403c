"""What all endpoints share: the engine, the requests in flight, readiness, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

from bough.base.config import Config
from bough.base.errors import ConfigError, InvalidRequest, Overloaded, Unavailable, program_cancelled
from bough.base.limits import Limits
from bough.base.messages import Hello, Stats
from bough.base.validate import ADAPTER_NAME, check_adapter_name
from bough.engine.async_engine import AsyncEngine
from bough.engine.generation import tenant_rid
from bough.server.errors import ModelNotFound
from bough.server.metrics import Metrics
from bough.server.quotas import UNBOUNDED, Held, Quota
from bough.server.texts import ProgramTexts
from bough.server.tool_memory import ToolMemory
from bough.text.formats import AnswerFormat, find_reasoning, find_tools

logger = logging.getLogger("bough.server")

HEARTBEAT_SECONDS = 2.0
"""Age of the last heartbeat from which on an idle engine counts as stuck."""

STEPS_WITHOUT_HEARTBEAT = 4
"""A busy engine sends no heartbeat within a step: it counts as stuck after so many of its longest steps beyond that."""

STEP_MEMORY = 0.95
"""What is left of the longest step after each heartbeat: one slow step does not excuse a stuck engine for good."""

TICK_SECONDS = 0.25
"""How often progress and stalled clients are looked at."""

_SUFFIX = re.compile(r"(-p\d+)?(-\d+)?")
"""What the rid of a sequence has beyond the rid of its request."""


@dataclass(eq=False, slots=True)
class Flight:
    """One HTTP request that does work: its sequences in the engine and the connection it answers on.

    ``blocked_since`` is set while a write waits for a client that does not read. ``programs`` are those that its
    envelopes name, until the engine is told or they end; ``cancelled`` the one of them that was cancelled before.
    """

    request_id: str
    abort_connection: Callable[[], None] | None = None
    tenant: str = ""
    rids: list[str] = field(default_factory=list)
    tokens: int = 0
    blocked_since: float | None = None
    programs: frozenset[str] = frozenset()
    cancelled: str | None = None
    started: float = field(default_factory=time.monotonic)


class Service:
    """State of the HTTP side of one process. Belongs to one event loop."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics(self)
        self.engine: AsyncEngine | None = None
        self.form = AnswerFormat(None, None)
        self.failure: str | None = None
        self.draining = False
        self.created = int(time.time())
        self.started = time.monotonic()
        self.on_start: list[Callable[[], object]] = []
        """Called when the server starts to run, on its event loop."""
        self.texts = ProgramTexts(config.limits.program_text_bytes)
        self.tools = ToolMemory(config.limits)
        self.large_body = asyncio.Lock()
        """Held by the request whose large body is parsed next."""
        self._resumable: set[asyncio.Task[None]] = set()
        self.quota_of: Callable[[str], Quota] = lambda tenant: UNBOUNDED
        self._held: dict[str, Held] = {}
        self._flights: dict[Flight, None] = {}
        self._rids: dict[str, Flight] = {}
        self._sequences = 0
        self._steps = -1
        self._attached_at = 0.0
        self._longest_step = math.inf
        self._progress_at = time.monotonic()

    @property
    def limits(self) -> Limits:
        return self.config.limits

    def attach(self, engine: AsyncEngine) -> None:
        """The engine is ready: serve with it."""
        self.engine = engine
        template = "" if engine.template is None else engine.template.source
        serve = self.config.serve
        self.form = AnswerFormat(
            find_tools(serve.tool_parser, template), find_reasoning(serve.reasoning_parser, template)
        )
        self.tools = ToolMemory(self.limits)
        self._attached_at = self._progress_at = time.monotonic()
        self._longest_step = math.inf
        engine.client.on_stats = self._on_heartbeat

    # Access for endpoints

    def ready_engine(self) -> AsyncEngine:
        """The engine, for new work. Raises Unavailable while it loads, drains or is away."""
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after=2.0)
        if self.failure is not None:
            raise Unavailable(f"the engine could not be started: {self.failure}", retry_after=10.0)
        if self.engine is None:
            raise Unavailable("the model is still loading", retry_after=2.0)
        if not self.engine.client.alive:
            raise Unavailable("the engine is restarting", retry_after=2.0)
        return self.engine

    @property
    def hello(self) -> Hello:
        """Facts about engine and model. Raises Unavailable before they are known."""
        hello = self.engine.client.hello if self.engine is not None else None
        if hello is None:
            raise Unavailable("the model is still loading", retry_after=2.0)
        return hello

    @property
    def model_name(self) -> str:
        return self.config.model.served_name or self.hello.model.name

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound unless ``name`` is absent, the served model, ``default``, or may be an adapter's."""
        self.adapter(name)

    def adapter(self, model: str | None, lora_path: str | None = None) -> str:
        """The adapter that a request names, by ``model`` (also as "served model:adapter") or by ``lora_path``.

        Empty where it means the model itself. Whether there is such an adapter, the engine finds out. Raises
        ModelNotFound for a model that is not served, InvalidRequest for a name that no adapter can have.
        """
        if lora_path:
            if self.config.lora.lora_dir is None:
                raise InvalidRequest("adapters are not served; start with --lora-dir", param="lora_path")
            check_adapter_name(lora_path)
            return lora_path
        if model is None or model in (self.model_name, "default", ""):
            return ""
        name = model.removeprefix(f"{self.model_name}:")
        if self.config.lora.lora_dir is None or not ADAPTER_NAME.fullmatch(name):
            raise ModelNotFound(
                f"the model {model[:256]!r} does not exist; this server serves {self.model_name!r}", param="model"
            )
        return name

    # Requests in flight

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def sequences(self) -> int:
        return self._sequences

    @contextlib.contextmanager
    def flight(
        self, request_id: str, abort_connection: Callable[[], None] | None = None, tenant: str = ""
    ) -> Iterator[Flight]:
        """Account for one request from its first byte of work to its last."""
        flight = Flight(request_id, abort_connection, tenant)
        self._flights[flight] = None
        try:
            yield flight
        finally:
            del self._flights[flight]
            flight.programs = frozenset()
            self._give_back(flight)
            for rid in flight.rids:
                self._rids.pop(rid, None)

    def flies(self, flight: Flight) -> bool:
        """``flight`` is not over."""
        return flight in self._flights

    def arriving(self, tenant: str) -> list[Flight]:
        """Requests of programs that the engine does not know of yet, oldest first; their texts may be long."""
        return [flight for flight in self._flights if flight.tenant == tenant and flight.programs]

    def admit(self, flight: Flight, rids: list[str], tokens: int) -> None:
        """Take the sequences ``rids``, which may come to ``tokens`` tokens, on behalf of ``flight``.

        Raises Overloaded when too much is in flight, InvalidRequest for an id that is in flight or too long, or for
        more than the tenant may ever have, or whose program was cancelled meanwhile.
        """
        if flight.cancelled is not None:
            raise program_cancelled(flight.cancelled)
        if self._sequences + len(rids) > self.limits.queue_requests:
            self.metrics.rejected.inc()
            raise Overloaded(f"{self._sequences} sequences are in flight; this request would add {len(rids)}")
        for rid in rids:
            if not 0 < len(rid) <= self.limits.rid_chars:
                raise InvalidRequest(f"rid must have 1 to {self.limits.rid_chars} characters", param="rid")
            if tenant_rid(flight.tenant, rid) in self._rids:
                raise InvalidRequest(f"a request with the rid {rid!r} is in flight", param="rid", code="duplicate_rid")
        if len(set(rids)) != len(rids):
            raise InvalidRequest("the rids of a batch must differ", param="rid", code="duplicate_rid")
        held = self._held.get(flight.tenant, Held())
        try:
            held.check(self.quota_of(flight.tenant), len(rids), tokens, self.limits.queue_requests)
        except Overloaded:
            self.metrics.rejected.inc()
            raise
        taken = [tenant_rid(flight.tenant, rid) for rid in rids]
        flight.rids += taken
        flight.tokens += tokens
        self._held[flight.tenant] = held
        held.sequences += len(taken)
        held.tokens += tokens
        self._sequences += len(taken)
        for rid in taken:
            self._rids[rid] = flight
        flight.programs = frozenset()

    def _give_back(self, flight: Flight) -> None:
        self._sequences -= len(flight.rids)
        if (held := self._held.get(flight.tenant)) is None:
            return
        held.sequences -= len(flight.rids)
        held.tokens -= flight.tokens
        if not held.sequences:
            del self._held[flight.tenant]

    def abort(self, rid: str, tenant: str = "") -> int:
        """Abort the request ``rid`` with all its prompts and sequences; the number of sequences told to stop."""
        name = tenant_rid(tenant, rid)
        rids = [r for r in self._rids if r.startswith(name) and _SUFFIX.fullmatch(r, len(name))]
        if rids and self.engine is not None:
            self.engine.client.abort(rids)
        return len(rids)

    def abort_all(self) -> int:
        rids = list(self._rids)
        if rids and self.engine is not None:
            self.engine.client.abort(rids)
        return len(rids)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` that belongs to no connection; it is cancelled when the server drains, and resumes later."""
        task = asyncio.create_task(work)
        self._resumable.add(task)
        task.add_done_callback(self._resumable.discard)
        return task

    # Readiness: proof of progress, answered from memory

    def problems(self) -> list[str]:
        """What stands against serving a request now; empty when ready."""
        if self.draining:
            return ["draining: the server is shutting down"]
        if self.failure is not None:
            return [f"engine: could not be started: {self.failure}"]
        if self.engine is None:
            return ["loading: the model is not loaded yet"]
        if not self.engine.client.alive:
            return ["engine: not running"]
        found = []
        now, stall_timeout = time.monotonic(), self.config.serve.stall_timeout
        age = min(self.engine.client.stats_age(), now - self._attached_at)
        patience = HEARTBEAT_SECONDS + (STEPS_WITHOUT_HEARTBEAT * self._longest_step if self._busy else 0.0)
        if age > min(stall_timeout, patience):
            found.append(f"heartbeat: the last one of the engine is {age:.1f} s old")
        if (stalled := now - self._progress_at) > stall_timeout:
            found.append(f"stall: no step for {stalled:.1f} s with work queued")
        return found

    @property
    def _busy(self) -> bool:
        stats = self.engine.client.stats if self.engine is not None else None
        return self._sequences > 0 or (stats is not None and stats.waiting + stats.running > 0)

    def _on_heartbeat(self, stats: Stats) -> None:
        self.metrics.observe_stats(stats, self.hello.schedule.policy)
        if stats.step_seconds:
            known = self._longest_step if self._longest_step < math.inf else 0.0
            self._longest_step = max(known * STEP_MEMORY, *stats.step_seconds)

    async def watch(self) -> None:
        """Follow the engine's progress and drop clients that stopped reading, for as long as the server runs."""
        for start in self.on_start:
            start()
        while True:
            self._follow_progress()
            now = time.monotonic()
            for flight in list(self._flights):
                if flight.blocked_since is not None and now - flight.blocked_since > self.limits.stream_stall_seconds:
                    logger.warning("request %s: the client stopped reading; closing", flight.request_id)
                    flight.blocked_since = None
                    if flight.abort_connection is not None:
                        flight.abort_connection()
            await asyncio.sleep(TICK_SECONDS)

    def _follow_progress(self) -> None:
        stats = self.engine.client.stats if self.engine is not None else None
        steps = -1 if stats is None else stats.steps
        if steps != self._steps or not self._busy:
            self._steps = steps
            self._progress_at = time.monotonic()

    # Shutdown

    async def drain(self, grace: float) -> None:
        """Refuse new work, give what runs ``grace`` seconds, then end it with an error event."""
        self.draining = True
        for task in self._resumable:
            task.cancel()
        deadline = time.monotonic() + grace
        logger.info("draining: %d requests in flight, %.0f s at most", len(self._flights), grace)
        while self._flights and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._flights:
            logger.warning("ending %d requests after %.0f s of grace", len(self._flights), grace)
            self.abort_all()
            deadline = time.monotonic() + 2.0
            while self._flights and time.monotonic() < deadline:
                await asyncio.sleep(0.02)


def check_config(config: Config) -> None:
    """Raises ConfigError for values of the serve section that cannot work."""
    serve = config.serve
    if not (math.isfinite(serve.grace) and serve.grace >= 0):
        raise ConfigError(f"the grace must be a number of seconds that is not negative, not {serve.grace:g}")
    find_tools(serve.tool_parser, "")
    find_reasoning(serve.reasoning_parser, "")
    if not serve.stall_timeout > 0:
        raise ConfigError(f"the stall timeout must be positive, not {serve.stall_timeout:g}")
    if (serve.tls_cert is None) != (serve.tls_key is None):
        raise ConfigError("HTTPS needs both a certificate and its key: --tls-cert and --tls-key")
    if serve.request_timeout is not None and not serve.request_timeout > 0:
        raise ConfigError(f"the request timeout must be positive, not {serve.request_timeout:g}")
