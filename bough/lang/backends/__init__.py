"""Where the calls of a program go."""

from __future__ import annotations

from typing import Any

from bough.lang.backends.base import BaseBackend


def as_backend(given: Any) -> BaseBackend:
    """The backend that ``given`` is, has as its ``endpoint``, or becomes: an Engine is used in this process.

    Raises TypeError for anything else.
    """
    if isinstance(given, BaseBackend):
        return given
    if hasattr(given, "endpoint"):
        return as_backend(given.endpoint)
    from bough.lang.backends.engine import EngineBackend, is_engine

    if is_engine(given):
        return EngineBackend.of(given)
    raise TypeError(f"{given!r} is not a backend: give an Engine, a RuntimeEndpoint or another BaseBackend")
