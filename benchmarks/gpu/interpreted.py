"""The engine as on a GPU, where there is none: its kernels interpreted, its streams and graphs stood for.

What a tiny run executes is then what a run on a GPU does, line by line, but for CUDA's own part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from unittest.mock import patch

import torch

from bough.base.config import Config
from bough.device.ops.triton.ops import TritonOps
from bough.device.platform.cpu import CpuPlatform
from bough.device.platform.cuda import FEATURES
from bough.engine import build as building
from bough.engine.executor import StreamExecutor
from bough.engine.resolve import resolve
from tests.device.triton.eager import Eager


class Processor(CpuPlatform):
    """A CPU that is taken for the newest GPU."""

    def features(self) -> tuple[str, ...]:
        return tuple(FEATURES)


def _resolve(config: Config, device: Literal["cpu", "cuda"]) -> Config:
    return resolve(config, "cuda")


@contextmanager
def interpreted() -> Iterator[None]:
    """Engines that are built within compute by interpreted kernels; Triton's interpreter must be mended."""
    ops = TritonOps(torch.device("cpu"), "interpreted")
    with patch.multiple(
        building, resolve_ops=lambda kernels, device, spare: ops, resolve=_resolve, CpuPlatform=Processor,
        LocalExecutor=StreamExecutor, CudaCapture=Eager,
    ):  # fmt: skip
        yield
