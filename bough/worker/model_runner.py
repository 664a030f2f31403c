"""A model, its attention backend, and the KV that it writes and reads."""

from __future__ import annotations

import numpy as np
import torch

from bough.device.attention.base import AttentionBackend
from bough.device.lora.pool import AdapterPool
from bough.models.base import Model
from bough.worker.forward_batch import ForwardBatch
from bough.worker.kv_pool import KVPool

Tensor = torch.Tensor


class ModelRunner:
    """Runs forwards. Everything is called in inference mode."""

    def __init__(
        self, model: Model, attention: AttentionBackend, pool: KVPool, adapters: AdapterPool | None = None
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._adapters = adapters

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Last hidden states [T, D]; the KV of the batch's tokens is in the pool afterwards."""
        self._attention.plan(batch.attention)
        if self._adapters is not None:
            self._adapters.plan(batch.adapters.tolist(), np.diff(batch.host_q_start).tolist())
        return self._model.forward(batch.tokens, self._pool.k, self._pool.v)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] of chosen positions -> logits [N, V]."""
        return self._model.logits(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] of chosen positions -> scores of a classifier's labels [N, labels]."""
        return self._model.scores(hidden)
