"""The implementations under test: the reference, and every instruction set that this machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bough.device.ops.cpu import CpuOps
from bough.device.ops.library import Library
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
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    """The kernels of the instruction set that is the parameter."""
    with kernels_of(request.param) as library:
        yield library
