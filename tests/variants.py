"""The instruction sets that kernels are compiled for, as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from bough.device.ops.build import VARIANTS

STEPS_BETWEEN = ("avx512", "avx512vnni")
"""Left out by default: but for how VNNI is done without, their code is that of the sets below and above them."""

ISAS: list[Any] = [pytest.param(isa, marks=pytest.mark.slow) if isa in STEPS_BETWEEN else isa for isa in VARIANTS]
