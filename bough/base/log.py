"""Logging: one format, stderr, never a prompt or a key."""

from __future__ import annotations

import logging
import sys


def configure(process: str, level: str) -> None:
    """Send the ``bough`` loggers to stderr, each line marked with the kind of process that wrote it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {process:<7} %(levelname).1s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("bough")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
