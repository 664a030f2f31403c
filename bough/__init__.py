"""bough: an LLM inference and serving system whose unit of work is the program."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.base.params import SamplingParams
    from bough.engine.async_engine import AsyncEngine
    from bough.engine.engine import Engine

__version__ = "0.1.0"
__all__ = ["AsyncEngine", "Engine", "SamplingParams"]

_HOMES = {
    "AsyncEngine": "bough.engine.async_engine",
    "Engine": "bough.engine.engine",
    "SamplingParams": "bough.base.params",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: `bough --help` and servers need none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
