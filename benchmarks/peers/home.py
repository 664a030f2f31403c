"""Where everything lives that is not in the repository, and how the setup runs its commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository."""

RESULTS = ROOT / "benchmarks" / "results"


class Unavailable(Exception):
    """A peer, a model or a row cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Home:
    """The folder with the peers' environments, the converted models and the logs."""

    path: Path

    @property
    def models(self) -> Path:
        return self.path / "models"

    def environment(self, name: str) -> Path:
        """The virtual environment of a peer."""
        return self.path / name

    def python(self, name: str) -> Path:
        return self.environment(name) / "bin" / "python"

    def log(self, name: str) -> Path:
        folder = self.path / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"

    def version(self, environment: str, package: str) -> str | None:
        """The version of a package in a peer's environment, None if it is not there."""
        sites = [str(p) for p in (self.environment(environment) / "lib").glob("python*/site-packages")]
        wanted = package.replace("-", "_").lower()
        for found in distributions(path=sites):
            if found.name.replace("-", "_").lower() == wanted:
                return found.version
        return None

    def call(self, log: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Run a command of the setup; Unavailable with the end of its output if it fails."""
        path = self.log(log)
        print(f"  {' '.join(str(c) for c in command)[:160]}", file=sys.stderr, flush=True)
        with path.open("ab") as out:
            done = subprocess.run(
                [str(c) for c in command], stdout=out, stderr=out, env={**os.environ, **(environment or {})}
            )
        if done.returncode:
            tail = path.read_text(errors="replace").strip().splitlines()[-3:]
            raise Unavailable(f"{command[0]} failed ({path}): " + " | ".join(tail)[-400:])


def default_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "bough-peers"
