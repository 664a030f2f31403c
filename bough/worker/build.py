"""Puts one worker together: parameters, then the KV pool in what memory is left, then the row state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from bough.base.config import KVConfig
from bough.base.errors import ConfigError
from bough.device.layers.context import LayerContext
from bough.models.registry import MODELS
from bough.worker.device_rows import DeviceRows
from bough.worker.kv_pool import KVPool
from bough.worker.memory import pool_tokens
from bough.worker.model_runner import ModelRunner
from bough.worker.sampling.logprobs import PromptLogprobs
from bough.worker.sampling.sampler import Sampler
from bough.worker.worker import Worker

KV_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "int8": torch.int8,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSizes:
    """The bounds of a worker's tables.

    Attributes:
        n_ids: ids that the tokenizer knows.
        context_length: longest sequence.
        n_rows: most sequences in one step.
    """

    n_ids: int
    context_length: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class BuiltWorker:
    """A worker and what its making found out."""

    worker: Worker
    pool_tokens: int
    n_parameters: int
    vocab_size: int
    labels: tuple[str, ...]
    causal: bool


def build_worker(
    config: Mapping[str, Any],
    context: LayerContext,
    sizes: WorkerSizes,
    kv: KVConfig,
    free_memory: Callable[[], int],
) -> BuiltWorker:
    """Load the model that ``config`` (a Hugging Face config) describes and size the pool.

    ``free_memory`` is asked for bytes once the parameters are loaded. Raises ConfigError for a model that cannot be
    served or memory that does not suffice. ``vocab_size`` of the result is the number of ids with a logit.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("the model's config has no 'model_type'")
    # With overlap a sequence that has reached its end is computed once more, one position further.
    n_positions = sizes.context_length + 1
    with torch.inference_mode():
        model = MODELS.get(model_type)(config, context, sizes.n_ids, n_positions)
        shape = model.kv_shape
        if kv.kv_dtype != "auto":
            shape = replace(shape, dtype=KV_DTYPES[kv.kv_dtype])
        if model.causal:
            n_tokens = pool_tokens(kv, shape.bytes_per_token, free_memory())
        else:  # which keeps nothing; the cells only count
            n_tokens = -(-sizes.context_length // kv.page_size) * kv.page_size * sizes.n_rows
        pool = KVPool(shape, n_tokens, context.device)
        rows = DeviceRows(sizes.n_rows, n_positions, context.device)
    runner = ModelRunner(model, context.attention, pool, context.adapters)
    sampler = Sampler(model.vocab_size, context.ops)
    worker = Worker(runner, rows, sampler, PromptLogprobs(context.ops), context.adapters)
    return BuiltWorker(worker, n_tokens, context.n_parameters, model.vocab_size, model.labels, model.causal)
