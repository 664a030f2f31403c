"""A plugin of pytest that hides every module that the bare machine of docs/gpu.md does not have."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.metadata import packages_distributions, requires
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

THERE = ("torch", "triton", "transformers", "pytest", "pytest-xdist", "msgspec", "llguidance", "pip", "setuptools")
"""What docs/gpu.md lists; what they need is there, too."""


def installed(names: Sequence[str]) -> set[str]:
    """The distributions ``names`` with all that they require."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        found.add(name)
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


class Bare(MetaPathFinder):
    """Finds nothing, and says so for what would be found."""

    def __init__(self) -> None:
        there = installed(THERE)
        self.hidden = {
            module
            for module, owners in packages_distributions().items()
            if not module.startswith("_") and there.isdisjoint(map(canonicalize_name, owners))
        } - {"bough", "benchmarks", "tests"}

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        if name.partition(".")[0] in self.hidden:
            raise ModuleNotFoundError(f"the bare machine has no {name}", name=name)


bare = Bare()
assert "hypothesis" in bare.hidden, "it is not installed here: nothing would be shown"
sys.meta_path.insert(0, bare)
