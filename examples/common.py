"""What the examples share: the backend that the command line names, the embedded model by default."""

from __future__ import annotations

import sys
from typing import Any

import bough as sgl


def use_backend() -> Any:
    """Set the default backend: the server at ``argv[1]``, or an engine in this process."""
    backend = sgl.RuntimeEndpoint(sys.argv[1]) if len(sys.argv) > 1 else sgl.Engine()
    sgl.set_default_backend(backend)
    return backend
