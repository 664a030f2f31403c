"""The composition root: the only file that knows both columns."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bough.base.config import Config, ModelConfig
from bough.base.errors import ConfigError
from bough.base.messages import PROTOCOL, Hello, ModelInfo, Request
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.lora.pool import AdapterPool
from bough.device.ops.registry import resolve_ops
from bough.device.platform.cpu import CpuPlatform
from bough.device.quant.scheme import resolve_scheme
from bough.engine.adapters import AdapterLoader
from bough.engine.executor import LocalExecutor
from bough.engine.resolve import resolve
from bough.engine.text import PROMPT_TAIL, load_text
from bough.grammar.base import BACKENDS, Backend, Vocabulary
from bough.grammar.compiler import GrammarCompiler
from bough.grammar.lazy import LazyBackend
from bough.kv.manager import KVManager
from bough.scheduler.loop import Scheduler
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopMatcher
from bough.text.tokenizer import Tokenizer
from bough.weights.fetch import resolve as fetch
from bough.weights.loader import Checkpoint, TokenizerSource, open_checkpoint
from bough.worker.build import BuiltWorker, WorkerSizes, build_worker

log = logging.getLogger(__name__)

GRAMMAR_BACKEND = "llguidance"
GRAMMAR_THREADS = 2
GRAMMAR_NICENESS = 19
"""Compiles give way to the threads that generate."""
GRAMMAR_STACK = 1 << 30
"""Address space, of which only what is used takes memory: compiling recurses along references, and a constraint of
the largest size allowed gets through with this, where the usual 8 MiB end the process."""

DEFAULT_CONTEXT = 4096
"""Context length of a model whose config does not tell."""


class Grammar:
    """The compiler of constraints with the threads that it works on."""

    def __init__(self, config: Config, vocabulary: Vocabulary) -> None:
        self._threads = _grammar_threads()

        def make() -> Backend:
            return BACKENDS.get(GRAMMAR_BACKEND)(vocabulary)

        self._backend = LazyBackend(self._threads.submit(make))
        self.compiler = GrammarCompiler(self._backend, config.limits, self._threads.submit)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._backend.close()


def _grammar_threads() -> ThreadPoolExecutor:
    threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammar", _be_nice)
    started = threading.Barrier(GRAMMAR_THREADS)
    before = threading.stack_size(GRAMMAR_STACK)
    try:
        for _ in range(GRAMMAR_THREADS):  # each waits for the others, so that all of them are made now
            threads.submit(started.wait)
    finally:
        threading.stack_size(before)
    return threads


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GRAMMAR_NICENESS)


@dataclass(frozen=True, slots=True)
class EngineCore:
    """A built engine, to be driven by :class:`bough.engine.driver.Driver`."""

    hello: Hello
    scheduler: Scheduler
    tokenizer_source: TokenizerSource
    executor: LocalExecutor
    grammar: Grammar
    adapters: AdapterLoader | None

    def close(self) -> None:
        """Stop the device and the grammar backend."""
        if self.adapters is not None:
            self.adapters.close()
        self.executor.shutdown()
        self.grammar.close()


def build(config: Config) -> EngineCore:
    """Load the model and put the engine together. Raises ConfigError with what to change when it cannot be done."""
    config = resolve(config)
    schedule = config.schedule
    assert schedule.max_running is not None
    checkpoint = open_checkpoint(fetch(config.model.path, config.model.revision))
    try:
        tokenizer, _ = load_text(checkpoint.tokenizer_source)
        context_length = _context_length(config.model, checkpoint)
        sizes = WorkerSizes(n_ids=tokenizer.vocab_size, context_length=context_length, n_rows=schedule.max_running)
        executor = LocalExecutor(lambda: _build_worker(config, checkpoint, sizes))
    finally:
        checkpoint.close()
    built = executor.built
    assert schedule.step_tokens is not None
    if not built.causal:  # whole texts, and nothing of one that another could use
        schedule = replace(schedule, step_tokens=max(schedule.step_tokens, context_length))
    kv = KVManager(
        built.pool_tokens, config.kv.page_size, sizes.n_rows, context_length, config.kv.eviction,
        config.kv.cache if built.causal else "none",
    )  # fmt: skip
    if kv.capacity < context_length:
        log.warning("the KV pool holds %d tokens: sequences end there, not at %d", kv.capacity, context_length)
    model = ModelInfo(
        name=config.model.served_name or _name(config.model.path, checkpoint.path),
        path=str(checkpoint.path),
        architecture=str(checkpoint.config["model_type"]),
        vocab_size=built.vocab_size,
        context_length=min(context_length, kv.capacity),
        eos_ids=_eos_ids(tokenizer, checkpoint),
        dtype=str(_dtype(config.model)).removeprefix("torch."),
        n_parameters=built.n_parameters,
        labels=built.labels,
        causal=built.causal,
        pooling=checkpoint.pooling or ("last" if built.causal else "mean"),
    )
    special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
    grammar = Grammar(config, Vocabulary(tokenizer.to_json(), model.vocab_size, model.eos_ids, special))
    adapters = (
        AdapterLoader(executor, Path(config.lora.lora_dir), config.lora.max_loras) if config.lora.lora_dir else None
    )
    scheduler = Scheduler(
        schedule, config.limits, model, kv, executor,
        clock=time.monotonic,
        draw=lambda: secrets.randbits(63),
        stop_matcher=_stop_matcher(tokenizer),
        compiler=grammar.compiler,
        adapters=adapters,
    )  # fmt: skip
    hello = Hello(PROTOCOL, os.getpid(), model, kv.capacity, config.kv.page_size, config.limits, schedule)
    return EngineCore(hello, scheduler, checkpoint.tokenizer_source, executor, grammar, adapters)


def _build_worker(config: Config, checkpoint: Checkpoint, sizes: WorkerSizes) -> BuiltWorker:
    platform = CpuPlatform(config.device.threads)
    ops = resolve_ops(config.device.kernels)
    attention = PagedAttention(ops)
    dtype = _dtype(config.model)
    scheme = resolve_scheme(config.model.quantize, ops, dtype, platform.features())
    adapters = AdapterPool(ops, dtype, config.lora.max_loras) if config.lora.lora_dir else None
    context = LayerContext(checkpoint, ops, scheme, attention, dtype, platform.device, adapters)
    return build_worker(checkpoint.config, context, sizes, config.kv, platform.free_memory)


def _stop_matcher(tokenizer: Tokenizer) -> Callable[[Request], StopMatcher]:
    def make(request: Request) -> StopMatcher:
        params = request.params
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=request.prompt[-PROMPT_TAIL:].tolist())
        return StopMatcher(params.stop, params.stop_regex, params.min_tokens, detokenizer)

    return make


def _dtype(model: ModelConfig) -> torch.dtype:
    """bfloat16 unless float32 is asked for: it is what models are trained in and half the bytes to read."""
    return torch.float32 if model.dtype == "float32" else torch.bfloat16


def _context_length(model: ModelConfig, checkpoint: Checkpoint) -> int:
    """What is asked for, at most what the model was made for."""
    most: Any = checkpoint.config.get("max_position_embeddings") or DEFAULT_CONTEXT
    asked = model.context_length or most
    if not 1 < asked <= most:
        raise ConfigError(f"context length must be in [2, {most}] for this model, not {asked}", param="context_length")
    return int(asked)


def _eos_ids(tokenizer: Tokenizer, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Ids that end a sequence: the tokenizer's, and those of the generation config (Llama 3 has several)."""
    named = checkpoint.generation_config.get("eos_token_id", [])
    more = named if isinstance(named, list) else [named]
    known = [token for token in more if isinstance(token, int) and 0 <= token < tokenizer.vocab_size]
    return tuple(dict.fromkeys([*tokenizer.eos_ids, *known]))


def _name(asked: str | None, path: Path) -> str:
    """The hub id or the file's own name."""
    if asked is not None and not Path(asked).exists():
        return asked
    return path.stem.split(".")[0] if path.is_file() else path.resolve().name
