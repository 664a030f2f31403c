"""Fixtures that several rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random llama with a context of 256 tokens; see :mod:`tests.tiny`."""
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny"))
