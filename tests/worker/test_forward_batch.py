"""A plan as the tensors of a forward."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bough.base.plan import LAST, Ints, StepPlan
from bough.worker.device_rows import DeviceRows
from bough.worker.forward_batch import ForwardBatch, HostStep

N_ROWS, MAX_LEN = 6, 24


def make_plan(lengths: list[tuple[int, int]], windowed: bool) -> StepPlan:
    """``lengths``: start and number of new tokens of rows N_ROWS - 1, N_ROWS - 2, ...; single tokens are LAST."""

    def ints(values: list[int]) -> Ints:
        return np.array(values, np.int32)

    total = sum(n for _, n in lengths)
    tokens = [LAST if n == 1 else 100 * i + j for i, (_, n) in enumerate(lengths) for j in range(n)]
    return StepPlan(
        step=1,
        released=ints([]),
        admitted=(),
        rows=ints([N_ROWS - 1 - i for i in range(len(lengths))]),
        start=ints([start for start, _ in lengths]),
        n_new=ints([n for _, n in lengths]),
        tokens=ints(tokens),
        out_loc=np.arange(total, dtype=np.int32) + 7,
        sample=np.array([n % 3 > 0 for _, n in lengths]),
        window_loc=np.arange(total, dtype=np.int32) + 70 if windowed else None,
    )


@pytest.mark.parametrize("windowed", [False, True])
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=N_ROWS))
def test_a_batch_of_the_host_is_that_of_a_device(windowed: bool, lengths: list[tuple[int, int]]) -> None:
    step = HostStep.from_plan(make_plan(lengths, windowed))
    here, there = (DeviceRows(N_ROWS, MAX_LEN, torch.device("cpu"), windowed) for _ in range(2))
    for rows in (here, there):
        rows.set_last(torch.arange(N_ROWS), torch.arange(N_ROWS) * 11)
    host, device = ForwardBatch.on_host(step, here), ForwardBatch.of(step, torch.tensor(step.array), there)
    assert (host.attention.window is not None) == (device.attention.window is not None) == windowed
    for name in ("tokens", "sample_at", "sample_rows"):
        assert torch.equal(getattr(host, name), getattr(device, name)) and getattr(host, name).dtype == torch.int32
    for field in fields(host.attention):
        mine, other = getattr(host.attention, field.name), getattr(device.attention, field.name)
        pairs = zip(mine, other) if field.name == "window" and windowed else [(mine, other)]
        for a, b in pairs:
            if isinstance(a, torch.Tensor):
                assert torch.equal(a, b) and a.dtype == torch.int32, field.name


@given(st.lists(st.integers(0, 12), min_size=1, max_size=N_ROWS))
def test_a_batch_of_decodes_is_that_of_any_tokens(starts: list[int]) -> None:
    plan = make_plan([(start, 1) for start in starts], windowed=False)
    here, there = (DeviceRows(N_ROWS, MAX_LEN, torch.device("cpu")) for _ in range(2))
    for rows in (here, there):
        rows.set_last(torch.arange(N_ROWS), torch.arange(N_ROWS) * 11)
    decodes, batch = ForwardBatch.of_decodes(plan, here), ForwardBatch.on_host(HostStep.from_plan(plan), there)
    assert decodes is not None
    for name in ("tokens", "sample_at", "sample_rows"):
        assert torch.equal(getattr(decodes, name), getattr(batch, name))
        assert getattr(decodes, name).dtype == torch.int32
    for name in ("page_table", "rows", "q_start", "seq_len", "positions", "out_loc"):
        mine, other = getattr(decodes.attention, name), getattr(batch.attention, name)
        assert torch.equal(mine, other) and mine.dtype == torch.int32 and mine.is_contiguous()
    assert decodes.attention.host is not None and batch.attention.host is not None
    for mine, other in zip(decodes.attention.host[:3], batch.attention.host[:3]):
        assert np.array_equal(mine, other)
    assert decodes.sampled.tolist() == batch.sampled.tolist()
    assert decodes.host_q_start.tolist() == batch.host_q_start.tolist()
    assert decodes.adapters.tolist() == batch.adapters.tolist()
