"""Puts one worker together: parameters, then the KV pool in what memory is left, then the row state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.base.messages import CacheKind
from bough.base.plan import StepPlan
from bough.device.attention.room import CapturedAttention
from bough.device.layers.context import LayerContext
from bough.device.ops.registry import Ops
from bough.models.base import KVShape, Model
from bough.models.registry import model_class
from bough.worker.device_rows import DeviceRows
from bough.worker.graphs import Capture, DecodeGraphs
from bough.worker.kv_pool import KVPool
from bough.worker.memory import PoolSize, pool_size, window_need
from bough.worker.model_runner import ModelRunner
from bough.worker.sampling.logprobs import PromptLogprobs
from bough.worker.sampling.sampler import Sampler
from bough.worker.worker import Worker

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSizes:
    """The bounds of a worker's tables.

    Attributes:
        n_ids: ids that the tokenizer knows.
        context_length: longest sequence.
        n_rows: most sequences in one step.
        step_tokens: most tokens in one step; 0: not known, so that no memory is kept for its activations, and layers
            that see a window have no pool of their own.
    """

    n_ids: int
    context_length: int
    n_rows: int
    step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker and what its making found out: ``window`` is None where all layers have the same cells."""

    worker: Worker
    pool: KVPool
    pool_tokens: int
    window: tuple[int, int, bool] | None
    """Positions that layers with a window see, their cells, and whether the positions are chunks."""
    cache: tuple[CacheKind, ...]
    n_parameters: int
    vocab_size: int
    labels: tuple[str, ...]
    causal: bool
    routed: bool
    """Whether each token uses a few of its experts only."""
    ops: Ops


def build_worker(
    config: Mapping[str, Any],
    context: LayerContext,
    sizes: WorkerSizes,
    kv: KVConfig,
    free_memory: Callable[[], int],
    peak: Callable[[Callable[[], object]], int] = lambda run: 0,
    capture: Capture | None = None,
) -> BuiltWorker:
    """Load the model that ``config`` (a Hugging Face config) describes and size the pool.

    ``free_memory`` is asked for bytes once the parameters are loaded, ``peak`` for those that the largest step takes
    beside them; with ``capture``, steps of decodes are captured, where attention and the model can be. Raises
    ConfigError for a model that cannot be served or memory that does not suffice. ``vocab_size`` of the result is the
    number of ids with a logit.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("the model's config has no 'model_type'")
    # With overlap a sequence that has reached its end is computed once more, one position further.
    n_positions = sizes.context_length + 1
    _check_tables(n_positions, sizes.n_rows, free_memory())
    with torch.inference_mode():
        model = model_class(model_type)(config, context, sizes.n_ids, n_positions)
        shape = model.kv_shape
        if kv.kv_dtype != "auto":
            shape = replace(shape, dtype=KV_DTYPES[kv.kv_dtype])
        if model.causal:
            taken = peak(lambda: run_largest(model, context, shape, sizes)) if sizes.step_tokens else 0
            need = None
            if shape.window and sizes.step_tokens:
                need = window_need(shape.window, sizes.n_rows, sizes.step_tokens, kv.page_size)
            size = pool_size(kv, shape, free_memory() - taken, need)
        else:  # which keeps nothing; the cells only count
            size = PoolSize(-(-sizes.context_length // kv.page_size) * kv.page_size * sizes.n_rows)
        pool = KVPool(shape, size.tokens, context.device, size.window_tokens)
        windowed = size.window_tokens is not None
        rows = DeviceRows(sizes.n_rows, n_positions, context.device, windowed)
        runner = ModelRunner(model, context.attention, pool, context.adapters)
        if capture is not None and model.causal and context.capturable:
            attention = cast(CapturedAttention, context.attention)
            adapted = context.adapters is not None and context.adapters.capturable
            spare = pool.spare_loc, pool.spare_window_loc
            graphs = DecodeGraphs(capture, attention, runner.compute, rows, spare, sizes.n_rows, adapted)
            runner.use(graphs)
    sampler = Sampler(model.vocab_size, context.ops)
    worker = Worker(runner, rows, sampler, PromptLogprobs(context.ops), context.adapters)
    return BuiltWorker(
        worker,
        pool,
        size.tokens,
        None if size.window_tokens is None else (shape.window, size.window_tokens, shape.chunked),
        shape.kinds(size.tokens, size.window_tokens),
        context.n_parameters,
        model.vocab_size,
        model.labels,
        model.causal,
        context.routed,
        context.ops,
    )


def _check_tables(n_positions: int, n_rows: int, free_bytes: int) -> None:
    """ConfigError where not even the locs of ``n_rows`` rows and the rotary table, of up to a kilobyte for a position,
    fit: a model may claim any length."""
    needed = n_positions * (8 * n_rows + 1024)
    if needed > free_bytes:
        raise ConfigError(
            f"{n_rows} sequences of {n_positions - 1} tokens need tables of {needed / 1e9:.1f} GB, and "
            f"{free_bytes / 1e9:.1f} GB are free: set a smaller context length",
            param="context_length",
        )


def run_largest(model: Model, context: LayerContext, shape: KVShape, sizes: WorkerSizes) -> None:
    """A step of ``sizes.step_tokens`` tokens and the logits of all rows, on a pool of its own.

    The tokens are the last ones that the context has room for, where attention cuts the keys into most parts; those
    before them all have the first cell.
    """
    n, length = sizes.step_tokens, min(sizes.step_tokens, sizes.context_length)
    n_new = np.array([length] * (n // length) + ([n % length] if n % length else []), np.int32)
    plan = StepPlan(
        0, n_new[:0], (), np.arange(len(n_new), dtype=np.int32), sizes.context_length - n_new, n_new,
        np.zeros(n, np.int32), np.arange(n, dtype=np.int32), np.ones(len(n_new), np.bool_),
    )  # fmt: skip
    runner = ModelRunner(model, context.attention, KVPool(shape, n, context.device))
    rows = DeviceRows(len(n_new), sizes.context_length, context.device)
    _, hidden, _ = runner.forward(plan, rows, rows.timer())
    runner.logits(hidden[: sizes.n_rows]).float()
