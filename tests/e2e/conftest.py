"""One server that the harmless tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .serving import TINY, Server, running


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random llama whose context is long enough for requests that take their time."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("long"), context_length=32768)


@pytest.fixture(scope="session")
def served(long_model: Path) -> Iterator[Server]:
    with running(str(long_model), "--served-name", "tiny", *TINY) as server:
        yield server
