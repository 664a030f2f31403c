"""A device for adapters whose loads take steps, fail for some names, and find another version now and then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bough.base.errors import NotFound

NAMES = ("a", "b", "c", "d", "broken")
BROKEN = "broken"
VERSIONS = ("0", "1", "2")


@dataclass(slots=True)
class Load:
    """One load: done at a step."""

    owner: FakeAdapters
    place: int
    name: str
    version: str
    at: int

    def done(self) -> bool:
        return self.owner.steps() >= self.at

    def result(self) -> str:
        if self.name == BROKEN:
            raise NotFound(f"there is no adapter {self.name!r}")
        self.owner.held[self.place] = f"{self.name}@{self.version}"
        return self.version


class FakeAdapters:
    """:class:`bough.base.plan.AdapterDevice`; the pipeline looks whether every plan finds its adapters there."""

    def __init__(self, places: int, steps: Callable[[], int] = lambda: 0, slow: bool = False) -> None:
        self.places, self.steps, self.slow = places, steps, slow
        self.held: dict[int, str] = {}
        """By place: name@version."""
        self.loads = 0

    def load(self, place: int, name: str, path: str) -> Load:
        assert 0 <= place < self.places and place not in self.held
        self.loads += 1
        delay = (7 * self.loads) % 11 if self.slow else 0
        return Load(self, place, name, VERSIONS[self.loads % 3], self.steps() + delay)

    def clear(self, place: int) -> None:
        self.held.pop(place, None)
