"""A model, its attention backend, and the KV that it writes and reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bough.base.plan import NO_ADAPTER, StepPlan
from bough.device.attention.base import AttentionBackend
from bough.device.lora.pool import AdapterPool
from bough.device.ops.decode import Decoded
from bough.device.platform.copies import Timer
from bough.models.base import Model
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch
from bough.worker.kv_pool import KVPool

if TYPE_CHECKING:
    from bough.worker.graphs import DecodeGraphs

Tensor = torch.Tensor


class ModelRunner:
    """Runs forwards. All but :meth:`forward` is called in inference mode."""

    def __init__(
        self, model: Model, attention: AttentionBackend, pool: KVPool, adapters: AdapterPool | None = None
    ) -> None:
        self._model = model
        self._attention = attention
        self._pool = pool
        self._graphs: DecodeGraphs | None = None
        self._adapters = adapters

    def forward(
        self, plan: StepPlan, rows: DeviceRows, timer: Timer, whole: bool = True
    ) -> tuple[ForwardBatch, Tensor, Decoded | None]:
        """The plan's tensors, and last hidden states [T, D], unless ``whole`` only of tokens that are sampled from; the
        KV of all is in the pool afterwards.

        Logits and the likeliest ids as well, where they came at once, and then ``rows`` know these. ``timer`` is
        started where the host's preparations end, and the device's work begins.
        """
        batch = ForwardBatch.of_decodes(plan, rows) if self._graphs is None else None
        if batch is not None:
            self._attention.plan(batch.attention)
        else:
            with torch.inference_mode():
                if self._graphs is not None and (replayed := self._graphs.forward(plan, timer)) is not None:
                    return *replayed, None
                batch = ForwardBatch.from_plan(plan, rows, whole)
                self._attention.plan(batch.attention)
        timer.start()
        if self._adapters is None and len(batch.sampled) == len(plan.tokens):
            decoded = self._model.decode(batch.tokens, rows.last_token, self._pool.k, self._pool.v)
            if decoded is not None:
                return batch, decoded.hidden, decoded
        # What needs no torch is done by now: behind kernels that have emptied the caches this takes time to enter, too.
        with torch.inference_mode():
            return batch, self.compute(batch), None

    def compute(self, batch: ForwardBatch) -> Tensor:
        """Last hidden states [T, D] of a batch that attention is planned for."""
        if self._adapters is not None and batch.places is not None:
            self._adapters.plan_captured(batch.places)
        elif self._adapters is not None:
            self._adapters.plan(batch.adapters.tolist(), np.diff(batch.host_q_start).tolist())
        return self._model.forward(batch.tokens, self._pool.k, self._pool.v)

    def use(self, graphs: DecodeGraphs) -> None:
        """Replay ``graphs``, made with :meth:`compute`, for the steps that they take."""
        self._graphs = graphs

    def logits(self, hidden: Tensor, places: int | NDArray[np.int32] = NO_ADAPTER) -> Tensor:
        """Hidden states [N, D] of chosen positions -> logits [N, V].

        ``places`` are those of their rows' adapters, [N], or the one that all have.
        """
        if self._adapters is not None:
            self._adapters.plan_head(np.broadcast_to(places, len(hidden)).tolist())
        return self._model.logits(hidden)

    def scores(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, D] of a sequence's last step -> scores of a classifier's labels [labels].

        They are made of its last token; where tokens attend to what comes after them, too, of its first.
        """
        return self._model.scores(hidden[-1:] if self._model.causal else hidden[:1])[0]
