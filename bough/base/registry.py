"""A typed table of lazily imported implementations.

A registry maps a short name to ``"package.module:attribute"``. Nothing is imported until the name is
asked for, so listing what exists (for the command line and for ``bough doctor``) costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Generic, TypeVar, cast

from bough.base.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names of one kind of part, e.g. ``Registry[EvictionPolicy]("eviction policy")``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._targets: dict[str, str] = {}

    def add(self, name: str, target: str) -> None:
        """Register ``target`` (``"module:attribute"``) under ``name``; a name can be taken only once."""
        if name in self._targets:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._targets[name] = target

    def names(self) -> list[str]:
        return list(self._targets)

    def get(self, name: str) -> T:
        """Import and return the part called ``name``.

        Raises ConfigError that lists the known names when there is none.
        """
        target = self._targets.get(name)
        if target is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self._targets)}")
        module, _, attribute = target.partition(":")
        return cast(T, getattr(importlib.import_module(module), attribute))
