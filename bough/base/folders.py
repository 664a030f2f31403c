"""Where things are kept on the user's machine."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/bough``, by default ``~/.cache/bough``."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rules say that a relative path counts as unset.
    return (base if base.is_absolute() else Path.home() / ".cache") / "bough"
