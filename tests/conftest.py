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

# Threads sleep at once where they wait for each other: one that spins keeps another process of tests from going on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# Files whose tests take longest, in seconds of all: they come first, so that no process is left with one of them when
# the others are done.
LONG = ("sim/test_planted.py", "device/triton/test_ahead.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    first = [root / name for name in LONG]
    items.sort(key=lambda item: item.path not in first)


def pytest_configure() -> None:
    _keep_to_own_cores()
    from bough.device.platform.cpu import spare_onednn

    spare_onednn()  # twins compute with torch before any engine is built


def _keep_to_own_cores() -> None:
    """Processes of tests share out the cores: what they start takes as many threads as it finds cores.

    Two processes that both compute on every core wait for each other at every barrier: up to ten times as long.
    """
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    number, cores = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")), sorted(os.sched_getaffinity(0))
    own = cores[number::processes] or [cores[number % len(cores)]]
    os.sched_setaffinity(0, own)
    os.environ["OMP_NUM_THREADS"] = str(len(own))  # MKL counts every core there is


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


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels share their work between two threads, however many cores there are, and on any of them, so that the two
    run at once."""
    import torch

    before, own = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
    os.sched_setaffinity(0, own)


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
