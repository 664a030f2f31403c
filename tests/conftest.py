"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.base.errors import ConfigError

# Read when Triton is first imported, whoever does it: without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Threads sleep at once where they wait for each other: while several processes of tests compute on the same cores, each
# that spins there keeps from going on whom it waits for. Up to ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Files whose tests take longest, in seconds of all: they come first, so that no process is left with one of them when
# the others are done.
LONG = ("sim/test_planted.py", "device/triton/test_ahead.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    first = [root / name for name in LONG]
    items.sort(key=lambda item: item.path not in first)


def pytest_configure() -> None:
    from bough.device.platform.cpu import spare_onednn

    spare_onednn()  # twins compute with torch before any engine is built


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What torch allocates is full of NaN, or of the largest integers: an element that nobody writes shows."""
    import torch  # most tests need none

    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random llama with a context of 256 tokens; see :mod:`tests.tiny`."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The GGUF file of the default model."""
    from bough.weights import embedded

    try:
        return embedded.default_model()
    except ConfigError as error:
        pytest.skip(f"the default model is not in the cache and cannot be fetched: {error.message}")
