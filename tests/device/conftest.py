"""The implementations under test: the reference, and every instruction set that this machine can run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from bough.device.ops.cpu import CpuOps
from bough.device.ops.reference import ReferenceOps
from bough.device.ops.registry import Ops
from tests.variants import ISAS, kernels_of


@pytest.fixture(params=["reference", *ISAS])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "reference":
        yield ReferenceOps("under test")
        return
    with kernels_of(request.param) as library:
        yield CpuOps(library, "under test")


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels share their work between two threads, however many cores there are, and on any of them, so that the two
    run at once."""
    before, own = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, own)
