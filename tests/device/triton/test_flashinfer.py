"""The steps that FlashInfer is given, against a stand-in that reads them as its documentation says."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bough.base.errors import ConfigError
from bough.base.plan import SharedPrefix
from bough.device.attention import flashinfer
from bough.device.attention.base import AttentionBatch
from bough.device.attention.flashinfer import FlashInferAttention
from bough.device.attention.work import SPLIT, HostBatch
from bough.device.ops.registry import Ops

from ..cases import Case, exact_attention, make_case, tolerance
from .test_attention import there

Tensor = torch.Tensor


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` of FlashInfer 0.6, with pages of any size, in plain torch."""

    plans = 0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, n_heads: int,
        n_kv_heads: int, head_dim: int, page_size: int, *, causal: bool, sm_scale: float, window_left: int,
        logits_soft_cap: float | None, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and n_heads % n_kv_heads == 0 and head_dim and q_data_type.is_floating_point and kv_data_type
        assert qo_indptr.device.type == kv_indptr.device.type == "cpu", "else the plan waits for the device"
        Wrapper.plans += 1
        self._starts = qo_indptr.tolist(), kv_indptr.tolist(), last_page_len.tolist()
        self._pages, self._size = kv_indices, page_size
        self._how = sm_scale, window_left, logits_soft_cap

    def run(self, q: Tensor, cells: tuple[Tensor, Tensor]) -> Tensor:
        scale, window_left, cap = self._how
        q_starts, page_starts, last = self._starts
        outs = []
        for i in range(len(last)):
            queries = q[q_starts[i] : q_starts[i + 1]].double()
            pages = self._pages[page_starts[i] : page_starts[i + 1]].long()
            n = (len(pages) - 1) * self._size + last[i]
            k, v = (x[pages].flatten(0, 1)[:n].double() for x in cells)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", queries, k) * scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            at, keys = torch.arange(n - len(queries), n, device=q.device)[:, None], torch.arange(n, device=q.device)
            hidden = (keys > at) | ((keys < at - window_left) if window_left >= 0 else keys < 0)
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
        return torch.cat(outs).to(q.dtype)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "plans", 0)


def planned(backend: FlashInferAttention, case: Case, shared: tuple[SharedPrefix, ...] = ()) -> None:
    rows, q_start, seq_len = case.rows, case.q_start, case.seq_len
    host = HostBatch(rows.numpy(), q_start.numpy(), seq_len.numpy(), shared)
    tensors: list[Any] = [there(t) for t in (case.page_table, rows, q_start, seq_len, rows, rows)]
    backend.plan(AttentionBatch(*tensors, host=host))


class Late:
    """A device that does what it is given only when somebody waits, and FlashInfer's part of it: a plan is written to
    memory of the host's, the same each time, which the device reads in its turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue: list[Callable[[], object]] = []
        late = self

        class LateWrapper(Wrapper):
            def __init__(self, workspace: Tensor, layout: str) -> None:
                super().__init__(workspace, layout)
                self._pinned: dict[str, Any] = {}

            def plan(self, *args: Any, **kwargs: Any) -> None:
                self._pinned.update(args=args, kwargs=kwargs)
                late.queue.append(self._copy)

            def _copy(self) -> None:
                super().plan(*self._pinned["args"], **self._pinned["kwargs"])

            def run(self, q: Tensor, cells: tuple[Tensor, Tensor]) -> Tensor:
                out = torch.full_like(q, torch.nan)
                late.queue.append(lambda: out.copy_(super(LateWrapper, self).run(q, cells)))
                return out

        class LatePassed:
            def __init__(self, device: torch.device) -> None:
                self._until = len(late.queue)

            def wait(self) -> None:
                late.work(self._until)

        monkeypatch.setattr(sys.modules["flashinfer"], "BatchPrefillWithPagedKVCacheWrapper", LateWrapper)
        monkeypatch.setattr(flashinfer, "Passed", LatePassed)
        self._done = 0

    def work(self, until: int | None = None) -> None:
        until = len(self.queue) if until is None else until
        while self._done < until:
            self.queue[self._done]()
            self._done += 1


@pytest.mark.usefixtures("installed")
def test_a_step_is_planned_while_those_before_it_wait(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    backend = FlashInferAttention(ops)
    cases = [
        make_case([n, 30], [2, 9], (4, 2, 64), torch.bfloat16, window=w, seed=n) for n in (9, 65, 40) for w in (0, 7)
    ]
    outs = []
    for case in cases:
        planned(backend, case)
        for _ in range(2):
            outs.append((backend.forward(there(case.q), there(case.k), there(case.v), case.scoring), case))
    late.work()
    for out, case in outs:
        assert ((out.cpu().double() - exact_attention(case)).abs() <= tolerance(case)).all()


@pytest.mark.usefixtures("installed")
def test_steps_of_every_kind(ops: Ops) -> None:
    backend = FlashInferAttention(ops)
    for lengths, new in (([1, 37, 100], [1, 1, 1]), ([5, 90, 70], [5, 1, 33])):
        case = make_case(lengths, new, (4, 2, 64), torch.bfloat16)
        planned(backend, case)
        for _ in range(2):
            out = backend.forward(there(case.q), there(case.k), there(case.v), case.scoring).cpu()
            assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()
    assert Wrapper.plans == 2, "once for a step, whatever its layers"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("window", "softcap"), [(7, 0.0), (0, 5.0), (40, 5.0)])
def test_options_of_layers(ops: Ops, window: int, softcap: float) -> None:
    backend = FlashInferAttention(ops)
    case = make_case([65, 30], [2, 9], (4, 2, 64), torch.bfloat16, softcap=softcap, window=window)
    planned(backend, case)
    out = backend.forward(there(case.q), there(case.k), there(case.v), case.scoring).cpu()
    assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()
    assert Wrapper.plans == 1


@pytest.mark.usefixtures("installed")
def test_what_it_does_not_know_is_left_to_triton(ops: Ops) -> None:
    backend = FlashInferAttention(ops)
    shared = make_case([SPLIT + 9, SPLIT + 40], [1, 1], (4, 2, 64), torch.bfloat16, shared=SPLIT)
    sinks = make_case([40], [1], (4, 2, 64), torch.bfloat16, sinks=True)
    rounded = make_case([40], [1], (4, 2, 64), torch.bfloat16, kv_dtype=torch.int8)
    others = [make_case([40], [1], (4, 2, dim), dtype) for dim, dtype in ((80, torch.bfloat16), (64, torch.float32))]
    group = SharedPrefix(np.arange(2, dtype=np.int32), SPLIT)
    for case in (shared, sinks, rounded, *others):
        planned(backend, case, (group,) if case is shared else ())
        scoring = replace(case.scoring, sinks=None if case.scoring.sinks is None else there(case.scoring.sinks))
        out = backend.forward(there(case.q), there(case.k), there(case.v), scoring).cpu()
        assert ((out.double() - exact_attention(case)).abs() <= tolerance(case)).all()
    assert Wrapper.plans == 0


def test_it_is_asked_for_where_it_is_not_installed(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="pip install"):
        FlashInferAttention(ops)
