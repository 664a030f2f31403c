"""A driver that plays the scheduler: it hands out locs and rows and writes plans by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough.base.config import KVConfig
from bough.base.params import SamplingParams
from bough.base.plan import LAST, Failure, PositionLogprobs, RowInit, SharedPrefix, StepPlan, StepResult
from bough.device.attention.paged import PagedAttention
from bough.device.layers.context import LayerContext
from bough.device.ops.registry import resolve_ops
from bough.device.quant.scheme import resolve_scheme
from bough.weights.loader import open_checkpoint
from bough.worker.build import WorkerSizes, build_worker
from bough.worker.worker import Worker

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Sequence_:
    """A sequence as a host sees it. ``locs`` are the cells of its computed tokens; ``pending`` its unseen tokens."""

    row: int
    ids: list[int]
    n_prompt: int
    init: RowInit
    locs: list[int]
    pending: int = 0
    admitted: bool = False
    failed: Failure | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens, seen or not, that are not computed yet."""
        return len(self.ids) + self.pending - len(self.locs)

    @property
    def generated(self) -> list[int]:
        return self.ids[self.n_prompt :]


class Driver:
    """Writes plans for a worker: any mixture of chunks and decodes, page sizes, sharing, overlap.

    With ``share`` its plans tell which sequences begin with the same cells.
    """

    def __init__(self, worker: Worker, n_tokens: int, page_size: int = 1) -> None:
        self.worker = worker
        self.page_size = page_size
        pages = list(range(n_tokens // page_size))
        random.Random(0).shuffle(pages)
        self.pages = pages
        self.n_steps = 0
        self.released: list[int] = []
        self.share = False

    def add(
        self,
        row: int,
        ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        n_prompt: int | None = None,
        shared: Sequence[int] = (),
        logprob_from: int = 0,
    ) -> Sequence_:
        """A sequence that enters with its first step; ``shared`` are cells of its first tokens."""
        n_prompt = len(ids) if n_prompt is None else n_prompt
        init = RowInit(
            row, np.array(shared, np.int32), np.array(ids, np.int32), n_prompt, params, seed, (2,), logprob_from
        )
        return Sequence_(row, list(ids), n_prompt, init, list(shared))

    def release(self, seq: Sequence_) -> None:
        self.released.append(seq.row)

    def launch(self, work: Sequence[tuple[Sequence_, int]]) -> tuple[StepResult, list[Sequence_]]:
        """One step of ``(sequence, new tokens)``; 0 stands for all that are left. Not committed."""
        admitted, tokens, out_loc, start, n_new, sample = [], [], [], [], [], []
        for seq, n in work:
            n = n or seq.left
            first = len(seq.locs)
            if not seq.admitted:
                seq.admitted = True
                admitted.append(seq.init)
            start.append(first)
            n_new.append(n)
            sample.append(n == seq.left)
            tokens += (seq.ids + [LAST] * seq.pending)[first : first + n]
            for position in range(first, first + n):
                if position % self.page_size == 0:
                    page = self.pages.pop()
                    loc = page * self.page_size
                else:
                    loc = seq.locs[-1] + 1
                seq.locs.append(loc)
                out_loc.append(loc)
            seq.pending += sample[-1]

        def ints(values: Sequence[int]) -> Any:
            return np.array(values, np.int32)

        rows = ints([seq.row for seq, _ in work])
        plan = StepPlan(
            self.n_steps, ints(self.released), tuple(admitted), rows, ints(start), ints(n_new), ints(tokens),
            ints(out_loc), np.array(sample), shared=self._groups([seq for seq, _ in work], start),
        )  # fmt: skip
        self.n_steps += 1
        self.released = []
        return self.worker.sample(self.worker.forward(plan)), [seq for seq, _ in work]

    def _groups(self, seqs: list[Sequence_], start: list[int]) -> tuple[SharedPrefix, ...]:
        """One group of all that have the most cells of the first sequence in common before their new ones."""
        common = [0 if seq.locs[:1] != seqs[0].locs[:1] else n for seq, n in zip(seqs, start)]
        rows = [i for i, n in enumerate(common) if n]
        if not self.share or len(rows) < 2:
            return ()
        columns = zip(*(seqs[i].locs[: common[i]] for i in rows))
        n = next((i for i, locs in enumerate(columns) if len(set(locs)) > 1), min(common[i] for i in rows))
        return (SharedPrefix(np.array(rows, np.int32), n),)

    def commit(self, launched: tuple[StepResult, list[Sequence_]]) -> None:
        result, seqs = launched
        at = 0
        for i, (seq, count) in enumerate(zip(seqs, result.counts.tolist())):
            seq.ids += result.tokens[at : at + count].tolist()
            at += count
            seq.pending -= count
            seq.failed = result.failed.get(i, seq.failed)
            seq.logprobs += result.logprobs.get(i, [])
            seq.prompt_logprobs += result.prompt_logprobs.get(i, [])
        assert at == len(result.tokens)

    def step(self, *work: tuple[Sequence_, int]) -> None:
        self.commit(self.launch(work))

    def run(self, seqs: Sequence[Sequence_], n: int, chunk: int = 0) -> None:
        """Generate until each of ``seqs`` has ``n`` tokens, all in one batch, prompts in pieces of ``chunk``."""
        while any(len(s.generated) < n for s in seqs):
            self.step(*[(s, min(chunk or s.left, s.left)) for s in seqs if len(s.generated) < n])


def make_driver(
    path: Path, *, dtype: torch.dtype = torch.float32, kernels: str = "reference", n_tokens: int = 4096,
    page_size: int = 1, n_rows: int = 16, n_ids: int = 1 << 20, context_length: int = 512,
    quantize: str = "auto", kv_dtype: Any = "auto", capture: Any = None,
) -> Driver:  # fmt: skip
    checkpoint = open_checkpoint(path)
    context = LayerContext(checkpoint, *device_parts(kernels, dtype, quantize))
    built = build_worker(
        checkpoint.config, context, WorkerSizes(n_ids=n_ids, context_length=context_length, n_rows=n_rows),
        KVConfig(pool_tokens=n_tokens, kv_dtype=kv_dtype), lambda: 1 << 40,
        capture=capture,
    )  # fmt: skip
    checkpoint.close()
    return Driver(built.worker, built.pool_tokens, page_size)


def device_parts(kernels: Any, dtype: torch.dtype, quantize: Any = "auto") -> tuple[Any, ...]:
    """Ops, scheme, attention, dtype and device; ``kernels`` "triton" are interpreted where there is no GPU."""
    if kernels == "triton":
        from bough.device.attention.triton import TritonAttention
        from bough.device.ops.triton.ops import TritonOps

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        triton = TritonOps(device, "under test")
        return triton, resolve_scheme(quantize, triton, dtype, ("fp8",)), TritonAttention(triton), dtype, device
    ops = resolve_ops(kernels)
    return ops, resolve_scheme(quantize, ops, dtype), PagedAttention(ops), dtype, torch.device("cpu")
