"""The instruction sets that kernels are compiled for, as parameters of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bough.device.ops.build import variants
from bough.device.ops.library import Library, load

STEPS_BETWEEN = ("avx512", "avx512bf16x2")
"""Left out by default: the first multiplies bytes as avx2 does, and bfloat16 as floats, which has tests of its own
(test_compact.py); the last differs from avx512bf16 in how many rows take turns with dense weights, which has, too."""

ISAS: list[Any] = [
    pytest.param(isa, marks=pytest.mark.slow) if isa in STEPS_BETWEEN else isa for isa in (*variants(), "avx512bf16x2")
]


@contextmanager
def kernels_of(isa: str) -> Iterator[Library]:
    """The library, which uses this instruction set meanwhile; the test is skipped on a machine without it."""
    library = load().library
    if library is None or isa not in library.isas():
        pytest.skip(f"this machine has no {isa} kernels")
    before = library.isa()
    library.set_isa(isa)
    try:
        yield library
    finally:
        library.set_isa(before)
