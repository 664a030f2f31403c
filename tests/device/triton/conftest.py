"""The Triton ops, interpreted on the CPU, or compiled where there is a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

if not torch.cuda.is_available():
    from .interpreter import mend

    mend()

from bough.device.ops.registry import Ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def ops() -> Ops:
    from bough.device.ops.triton.ops import TritonOps

    return TritonOps(DEVICE, "under test")
