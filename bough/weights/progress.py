"""Progress on standard error: lines always, bars where a person is watching."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Never, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def say(line: str) -> None:
    """Tell the person at the terminal, or the log that stands in for one, what is about to take a while."""
    sys.stderr.write(f"bough: {line}\n")
    sys.stderr.flush()


def byte_bar(description: str, total: int) -> tqdm[Never]:
    """A bar that counts bytes; it is drawn only if standard error is a terminal."""
    return tqdm(
        total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1000, file=sys.stderr, disable=None
    )


def watched(items: Iterable[T], description: str, unit: str, show: bool | None = None) -> Iterable[T]:
    """``items``, with a bar that advances as they are taken.

    ``show`` None draws it only if standard error is a terminal; True and False decide it.
    """
    hidden = None if show is None else not show
    return tqdm(items, desc=description, unit=unit, file=sys.stderr, leave=False, disable=hidden)
