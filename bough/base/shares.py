"""Bounded books that tenants share: whoever has most in one loses his oldest first."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class _Owned(Generic[K]):
    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: tuple[dict[K, int], dict[K, int]] = {}, {}  # those that go first, and last; oldest first
        self.size = 0


class Shares(Generic[K]):
    """What each tenant has in a book, and how large it is. Whoever owns the book keeps ``size`` within its bound.

    Of a book for ``n`` that ``t`` tenants share, one that has no more than ``n / t`` never loses anything to the
    others, and one that is alone has all of it.

    Attributes:
        size: of all entries together.
    """

    def __init__(self) -> None:
        self.size = 0
        self._owned: dict[str, _Owned[K]] = {}

    def __iter__(self) -> Iterator[tuple[str, K]]:
        """Tenants and keys; those of a tenant in the order in which they go."""
        return ((tenant, key) for tenant, owned in self._owned.items() for part in owned.entries for key in part)

    def put(self, tenant: str, key: K, size: int = 1, *, last: bool = False) -> None:
        """``key`` is the newest of ``tenant`` and of this size now; ``last``: it goes after those that are not."""
        self.pop(tenant, key)
        owned = self._owned.setdefault(tenant, _Owned())
        owned.entries[last][key] = size
        owned.size += size
        self.size += size

    def pop(self, tenant: str, key: K) -> None:
        """Idempotent."""
        owned = self._owned.get(tenant)
        if owned is None:
            return
        for part in owned.entries:
            size = part.pop(key, 0)
            owned.size -= size
            self.size -= size
        if not any(owned.entries):
            del self._owned[tenant]

    def oldest(self, tenant: str | None = None) -> tuple[str, K]:
        """Of ``tenant``, or of whoever has most, what goes first. The book, or ``tenant``, has something."""
        if tenant is None:
            tenant = max(self._owned, key=lambda name: self._owned[name].size)
        first, last = self._owned[tenant].entries
        return tenant, next(iter(first or last))
