"""What the C library keeps of freed memory."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library keeps it as glibc does: an arena for every thread."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
