"""Where things are kept on the user's machine."""

from __future__ import annotations

import os
from pathlib import Path

from bough.base.errors import ConfigError


def user_cache() -> Path:
    """``$XDG_CACHE_HOME/bough``, by default ``~/.cache/bough``. Raises ConfigError for a user without a home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG rules say that a relative path counts as unset.
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "bough"
    except RuntimeError as error:
        raise ConfigError("there is no home folder to keep files in: set XDG_CACHE_HOME") from error
