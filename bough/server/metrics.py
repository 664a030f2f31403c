"""Prometheus metrics: what this process measures, and the engine's counters as its heartbeats report them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bough.base.messages import Stats
from bough.base.program import ProgramStats
from bough.engine.generation import Chunk

if TYPE_CHECKING:
    from bough.server.service import Service

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5)
_STEPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 5)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_COUNTERS = (
    ("steps", "Steps of the engine"),
    ("prompt_tokens", "Prompt tokens of admitted requests"),
    ("cached_tokens", "Prompt tokens that came from the cache"),
    ("computed_tokens", "Tokens computed by forwards"),
    ("generated_tokens", "Generated tokens"),
    ("evicted_tokens", "Tokens evicted from the cache"),
    ("retracted", "Running sequences sent back to the queue"),
    ("finished", "Finished sequences"),
    ("aborted", "Aborted sequences"),
    ("rejected", "Sequences that the engine refused"),
    ("bad_messages", "Messages that could not be decoded"),
)
_WAITS = (
    ("waits", "ended", "Waits of the engine for who was just answered and may ask again at once"),
    ("waits_worth", "worth", "Waits in which somebody came"),
    ("waited_seconds", "seconds", "Time of all these waits"),
)
_GAUGES = (
    ("waiting", "queue_length", "Sequences that wait"),
    ("running", "running", "Sequences that run"),
    ("pool_tokens", "kv_pool_tokens", "Size of the KV pool in tokens"),
    ("free_tokens", "kv_free_tokens", "Free tokens of the KV pool"),
    ("tree_tokens", "kv_tree_tokens", "Cached tokens in the tree"),
    ("locked_tokens", "kv_locked_tokens", "Tokens that running sequences hold"),
    ("window_tokens", "kv_window_tokens", "Size in tokens of the pool of layers that see a window; 0 without one"),
    ("free_window_tokens", "kv_window_free_tokens", "Free tokens of that pool"),
    ("idle_window_tokens", "kv_window_idle_tokens", "Tokens of it that no running sequence can see"),
)


_PROGRAM_COUNTERS = (
    ("opened", "Programs that began"),
    ("ended", "Programs that ended"),
    ("forgotten", "Programs that never ended and were forgotten"),
    ("prompt_tokens", "Prompt tokens of programs"),
    ("cached_tokens", "Prompt tokens of programs that came from the cache"),
    ("prefetched_tokens", "Tokens computed ahead of the requests of programs"),
    ("used_tokens", "Tokens computed ahead that a later request found in the cache"),
)
_PROGRAM_GAUGES = (
    ("known", "programs", "Programs that have requests or may come back"),
    ("seated", "programs_seated", "Programs whose KV is kept between their requests"),
)
_COMPLETIONS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600)


class Metrics:
    """All metrics of one service, in a registry of its own."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        make = self.registry
        self.ttft = Histogram(
            "bough_time_to_first_token_seconds", "From request to first token", registry=make, buckets=_LATENCY
        )
        self.gap = Histogram(
            "bough_inter_token_latency_seconds", "Between the tokens of one sequence", registry=make, buckets=_GAPS
        )
        self.e2e = Histogram(
            "bough_request_duration_seconds", "From request to last token", registry=make, buckets=_LATENCY
        )
        self.step = Histogram(
            "bough_step_seconds", "Host and device time of one turn of the scheduler", registry=make, buckets=_STEPS
        )
        self.device = Histogram("bough_device_seconds", "Device time of one step", registry=make, buckets=_STEPS)
        self.step_tokens = Histogram(
            "bough_step_tokens", "Tokens computed by one step", registry=make, buckets=_STEP_TOKENS
        )
        self.completion = Histogram(
            "bough_program_completion_seconds", "From a program's first request to its end", ("policy",), registry=make,
            buckets=_COMPLETIONS,
        )  # fmt: skip
        self.rejected = Counter(
            "bough_overloaded", "Requests refused by this process because of overload", registry=make
        )
        self.disconnected = Counter("bough_disconnected", "Requests whose client went away", registry=make)
        self.responses = Counter(
            "bough_http_responses", "Responses by path and status", ("path", "status"), registry=make
        )
        self.registry.register(_EngineCollector(service))

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def observe_stats(self, stats: Stats, policy: str) -> None:
        """Take the times of a heartbeat of an engine that schedules by ``policy``."""
        for seconds in stats.programs.completions:
            self.completion.labels(policy).observe(seconds)
        for histogram, values in (
            (self.step, stats.step_seconds),
            (self.device, stats.device_seconds),
            (self.step_tokens, stats.step_tokens),
        ):
            for value in values:
                histogram.observe(value)


class Clock:
    """Observes the times of a request that came at ``started``, in the clock of ``time.perf_counter``."""

    def __init__(self, metrics: Metrics, started: float) -> None:
        self._metrics = metrics
        self._started = started
        self._last: dict[int, float] = {}

    def take(self, chunk: Chunk) -> None:
        """Note the news of one of the request's sequences at the moment they come."""
        now = time.perf_counter()
        if chunk.tokens:
            before = self._last.get(chunk.index)
            if before is None:
                self._metrics.ttft.observe(now - self._started)
            else:
                self._metrics.gap.observe((now - before) / len(chunk.tokens))
            self._last[chunk.index] = now
        if chunk.finish is not None:
            self._metrics.e2e.observe(now - self._started)


class _EngineCollector(Collector):
    """The last heartbeat as metrics."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield GaugeMetricFamily("bough_ready", "Whether /readyz answers 200", value=float(not service.problems()))
        yield GaugeMetricFamily("bough_requests_in_flight", "HTTP requests that do work", value=service.in_flight)
        stats = service.engine.client.stats if service.engine is not None else None
        if stats is not None:
            yield from _engine_metrics(stats)
            yield from _program_metrics(stats.programs, service.hello.schedule.policy)

    def describe(self) -> Iterable[Metric]:
        return ()


def _engine_metrics(stats: Stats) -> Iterator[Metric]:
    for field, help in _COUNTERS:
        yield CounterMetricFamily(f"bough_{field}", help, value=getattr(stats, field))
    for name, field, help in _WAITS:
        yield CounterMetricFamily(f"bough_{name}", help, value=getattr(stats.waits, field))
    for field, name, help in _GAUGES:
        yield GaugeMetricFamily(f"bough_{name}", help, value=getattr(stats, field))
    used = 1 - stats.free_tokens / stats.pool_tokens if stats.pool_tokens else 0.0
    yield GaugeMetricFamily("bough_kv_used_share", "Share of the KV pool that is not free", value=used)
    hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    yield GaugeMetricFamily("bough_cache_hit_rate", "Cached share of all prompt tokens so far", value=hits)


def _program_metrics(stats: ProgramStats, policy: str) -> Iterator[Metric]:
    """By policy and never by program: their ids are without end."""
    for field, help in _PROGRAM_COUNTERS:
        counter = CounterMetricFamily(f"bough_programs_{field}", help, labels=("policy",))
        counter.add_metric((policy,), getattr(stats, field))
        yield counter
    for field, name, help in _PROGRAM_GAUGES:
        gauge = GaugeMetricFamily(f"bough_{name}", help, labels=("policy",))
        gauge.add_metric((policy,), getattr(stats, field))
        yield gauge
    leases = CounterMetricFamily("bough_leases", "Leases by how they were answered", labels=("answer",))
    for answer in ("granted", "clipped", "denied"):
        leases.add_metric((answer,), getattr(stats, answer))
    yield leases
    yield GaugeMetricFamily("bough_leased_tokens", "Tokens of the cache under a lease", value=stats.leased_tokens)
