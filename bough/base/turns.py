"""Queues whose tenants take turns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Turns(Generic[K, V]):
    """Values that wait, of tenants that take turns; one that several want has a place among those of each."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[K, V]] = {}
        self._tenants: dict[K, dict[str, None]] = {}

    def push(self, tenant: str, key: K, value: V) -> None:
        """``value`` waits behind the others of ``tenant``."""
        self._queues.setdefault(tenant, {})[key] = value
        self._tenants.setdefault(key, {})[tenant] = None

    def get(self, key: K) -> V | None:
        """What waits under ``key``."""
        tenants = self._tenants.get(key)
        return self._queues[next(iter(tenants))][key] if tenants else None

    def pop(self) -> V | None:
        """The oldest one of the tenant whose turn it is; its next turn comes after all others'."""
        if not self._queues:
            return None
        tenant = next(iter(self._queues))
        key, value = next(iter(self._queues[tenant].items()))
        self.drop(key)
        if tenant in self._queues:
            self._queues[tenant] = self._queues.pop(tenant)
        return value

    def drop(self, key: K) -> None:
        """Nothing waits under ``key`` any more."""
        for tenant in self._tenants.pop(key, ()):
            del self._queues[tenant][key]
            if not self._queues[tenant]:
                del self._queues[tenant]
