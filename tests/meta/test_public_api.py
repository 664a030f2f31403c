"""The public surface is pinned; growing it is a decision."""

from __future__ import annotations

import bough

PUBLIC = ["AsyncEngine", "Engine", "SamplingParams"]


def test_public_names() -> None:
    assert sorted(bough.__all__) == PUBLIC


def test_public_names_exist() -> None:
    for name in bough.__all__:
        assert getattr(bough, name) is not None
