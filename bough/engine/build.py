"""The composition root: the only file that knows both columns."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from bough.base.config import Config, ModelConfig
from bough.base.errors import ConfigError
from bough.base.messages import PROTOCOL, CacheKind, Hello, ModelInfo, Request
from bough.device.attention.base import AttentionBackend
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.layers.dummy import DummyContext
from bough.device.lora.pool import AdapterPool
from bough.device.ops.cpu import CpuOps
from bough.device.ops.registry import Ops, resolve_ops
from bough.device.platform.base import Platform
from bough.device.platform.cpu import CpuPlatform, usable_processors
from bough.device.platform.cuda import CudaPlatform, device_of
from bough.device.quant.scheme import resolve_scheme
from bough.engine.adapters import AdapterLoader
from bough.engine.executor import LocalExecutor, StreamExecutor, WorkerExecutor
from bough.engine.resolve import paced, resolve
from bough.engine.text import PROMPT_TAIL, load_text
from bough.grammar.base import BACKENDS, Vocabulary
from bough.grammar.compiler import GrammarCompiler
from bough.grammar.lazy import LazyBackend
from bough.grammar.tags import Tags
from bough.kv.manager import KVManager, WindowSize
from bough.scheduler.loop import Scheduler
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import StopMatcher
from bough.text.tokenizer import Tokenizer
from bough.weights.fetch import resolve as fetch
from bough.weights.loader import Checkpoint, TokenizerSource, open_checkpoint, stored_bytes
from bough.worker.build import BuiltWorker, WorkerSizes, build_worker
from bough.worker.graphs import CudaCapture

log = logging.getLogger(__name__)

GRAMMAR_THREADS = 2

DEFAULT_CONTEXT = 4096
"""Context length of a model whose config does not tell."""

SECOND_FORMS = 4
"""Of the memory that weights leave, the part that second forms of them may take."""


class Grammar:
    """The compiler of constraints with the threads that it works on."""

    def __init__(self, config: Config, tokenizer: Tokenizer, model: ModelInfo) -> None:
        self._threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammar")
        make = BACKENDS.get(config.schedule.grammar_backend)
        self._backend = LazyBackend(lambda: make(_vocabulary(tokenizer, model)))
        self._prepared = False
        tags = Tags(tokenizer.token_bytes, tokenizer.vocab_size, self._threads.submit)
        self.compiler = GrammarCompiler(self._backend, config.limits, self._threads.submit, GRAMMAR_THREADS, tags)

    def prepare(self) -> bool:
        """Have the vocabulary read on a thread; whether nobody did before."""
        if self._prepared:
            return False
        self._prepared = True
        self._threads.submit(self._backend.read)
        return True

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._backend.close()


def _vocabulary(tokenizer: Tokenizer, model: ModelInfo) -> Vocabulary:
    special = {tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids)}
    return Vocabulary(
        tokenizer.to_json(), model.vocab_size, model.eos_ids, special, tokenizer.vocab_size, tokenizer.token_bytes
    )


@dataclass(frozen=True, slots=True)
class EngineCore:
    """A built engine, to be driven by :class:`bough.engine.driver.Driver`."""

    hello: Hello
    scheduler: Scheduler
    tokenizer_source: TokenizerSource
    executor: WorkerExecutor
    grammar: Grammar
    adapters: AdapterLoader | None
    kv: KVManager

    def prepare(self) -> bool:
        """Put memory behind a few of the cells that will be used next or, once they have it, have the vocabulary read
        for constraints; whether there was any of it to do."""
        return self.executor.built.pool.prepare(self.kv.used) or self.grammar.prepare()

    def keep_up(self) -> None:
        """Put memory behind as many cells as the last steps have taken into use."""
        self.executor.built.pool.keep_up(self.kv.used)

    def close(self) -> None:
        """Stop the device and the grammar backend."""
        if self.adapters is not None:
            self.adapters.close()
        self.executor.shutdown()
        self.grammar.close()


def build(config: Config) -> EngineCore:
    """Load the model and put the engine together. Raises ConfigError with what to change when it cannot be done."""
    device = device_of(config.device.device)
    config = resolve(config, device)
    schedule = config.schedule
    assert schedule.max_running is not None
    checkpoint = open_checkpoint(
        fetch(config.model.path, config.model.revision), weights=config.model.load_format != "dummy"
    )
    try:
        tokenizer, _ = load_text(checkpoint.tokenizer_source)
        context_length = _context_length(config.model, checkpoint)
        assert schedule.step_tokens is not None
        sizes = WorkerSizes(
            n_ids=tokenizer.vocab_size, context_length=context_length, n_rows=schedule.max_running,
            step_tokens=schedule.step_tokens,
        )  # fmt: skip
        executor: WorkerExecutor
        if device == "cuda":
            executor = StreamExecutor(lambda: _build_worker(config, CudaPlatform(), checkpoint, sizes))
        else:
            platform = CpuPlatform(config.device.threads)
            if platform.threads > (usable := usable_processors()):
                log.warning(
                    "%d threads share %d processors, and wait for each other at every step", platform.threads, usable
                )
            driven = LocalExecutor if schedule.depth else StreamExecutor
            executor = driven(lambda: _build_worker(config, platform, checkpoint, sizes))
    finally:
        checkpoint.close()
    built = executor.built
    if built.causal:
        schedule = paced(schedule, built.n_parameters, built.routed)
    else:  # whole texts, and nothing of one that another could use
        schedule = replace(schedule, step_tokens=max(sizes.step_tokens, context_length))
    kv = KVManager(
        built.pool_tokens, config.kv.page_size, sizes.n_rows, context_length, config.kv.eviction,
        config.kv.cache if built.causal else "none", None if built.window is None else WindowSize(*built.window),
    )  # fmt: skip
    if built.causal:
        for kind in built.cache:
            log.info("KV of %s", _shown(kind))
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
    grammar = Grammar(config, tokenizer, model)
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
    cache = built.cache if built.causal else ()
    hello = Hello(
        PROTOCOL, os.getpid(), model, kv.capacity, config.kv.page_size, config.limits, schedule, cache,
        _kernels(built.ops),
    )  # fmt: skip
    return EngineCore(hello, scheduler, checkpoint.tokenizer_source, executor, grammar, adapters, kv)


def _build_worker(config: Config, platform: Platform, checkpoint: Checkpoint, sizes: WorkerSizes) -> BuiltWorker:
    if config.kv.kv_dtype == "fp8" and "fp8" not in platform.features():
        raise ConfigError("an fp8 KV pool needs a GPU of compute capability 8.9 or newer", param="kv_dtype")
    # What a file holds may take more memory than it does there, so what is really left counts as well.
    bound = max(0, platform.free_memory() - stored_bytes(checkpoint)) // SECOND_FORMS
    ops = resolve_ops(
        config.device.kernels, platform.device, lambda: min(bound, platform.free_memory() // SECOND_FORMS)
    )
    dtype = _dtype(config.model)
    scheme = resolve_scheme(config.model.quantize, ops, dtype, platform.features())
    made = DummyContext if config.model.load_format == "dummy" else LayerContext
    adapters = AdapterPool(ops, dtype, config.lora.max_loras) if config.lora.lora_dir else None
    context = made(checkpoint, ops, scheme, _attention(ops, config.device.attention), dtype, platform.device, adapters)
    graphs = ops.name == "triton" and config.device.graphs == "on"
    built = build_worker(
        checkpoint.config, context, sizes, config.kv, platform.free_memory, platform.peak,
        CudaCapture() if graphs else None,
    )  # fmt: skip
    if isinstance(ops, CpuOps) and ops.compact.n_bytes:
        log.info("bfloat16 weights in 12 bits, for steps of few rows: another %.0f MB", ops.compact.n_bytes / 1e6)
    return built


def _shown(kind: CacheKind) -> str:
    """What one kind of layers keeps, for people."""
    seen = f" that see {kind.window} positions" if kind.window else ""
    return (
        f"{kind.layers} {kind.kind} layers{seen}: {kind.tokens} tokens of {kind.bytes_per_token} bytes, "
        f"{kind.bytes / 1e6:.0f} MB"
    )


def _kernels(ops: Ops) -> str:
    """Those in use, for people: on the CPU the instruction set that they are compiled for."""
    if isinstance(ops, CpuOps):
        return ops.library.isa()
    return "Triton's" if ops.name == "triton" else "none, plain torch is used"


def _attention(ops: Ops, asked: Literal["triton", "flashinfer"]) -> AttentionBackend:
    if ops.name == "triton" and asked == "flashinfer":
        from bough.device.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(ops)
    if ops.name == "triton":
        from bough.device.attention.triton import TritonAttention

        return TritonAttention(ops)
    return PagedAttention(ops)


def _stop_matcher(tokenizer: Tokenizer) -> Callable[[Request], StopMatcher]:
    def make(request: Request) -> StopMatcher:
        params = request.params
        detokenizer = IncrementalDetokenizer(tokenizer, prompt_tail=request.prompt[-PROMPT_TAIL:].tolist())
        return StopMatcher(params.stop, params.stop_regex, params.min_tokens, detokenizer)

    return make


def _dtype(model: ModelConfig) -> torch.dtype:
    """bfloat16 unless another is asked for: it is what models are trained in and half the bytes to read."""
    return {"float32": torch.float32, "float16": torch.float16}.get(model.dtype, torch.bfloat16)


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
