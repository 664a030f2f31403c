"""What the package imports is declared, and what is declared is pinned for the Makefile."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from .source import ROOT, imports, modules

MODULE_OF = {"google-re2": "re2", "flashinfer-python": "flashinfer"}
"""Distribution -> module, where the names differ."""

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the source tree", allow_module_level=True)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def name_of(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group()


def distributions(requirements: list[str]) -> set[str]:
    return {name_of(r).lower().replace("_", "-") for r in requirements} - {"bough"}


def modules_of(names: set[str]) -> set[str]:
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names}


def third_party(*, runtime: bool) -> dict[str, str]:
    """Third-party module -> one place that imports it; ``runtime`` leaves the optional rooms and imports out."""
    found = {}
    for m in modules():
        for i in imports(m):
            top = i.target.split(".")[0]
            if top in sys.stdlib_module_names or top == "bough" or (runtime and (i.deferred or i.typing_only)):
                continue
            found.setdefault(top, f"{m.name}:{i.line}")
    return found


# starlette and pydantic are fastapi's public vocabulary and come with it.
COME_ALONG = {"starlette", "pydantic"}

# Whoever uses such a backend of the language, or a video, has it installed; litellm's bounds exclude our versions.
BROUGHT_ALONG = {"litellm", "tiktoken", "vertexai", "google", "cv2"}


ON_DEMAND = {"triton": "bough.device.ops.triton.", "transformers": "bough.models.fallback"}
"""Module of an extra -> the package whose modules need it and are imported only where it is there."""


def test_imports_at_module_level_are_dependencies() -> None:
    declared = modules_of(distributions(PROJECT["dependencies"])) | COME_ALONG
    missing = {top: where for top, where in third_party(runtime=True).items() if top not in declared}
    assert not {top: where for top, where in missing.items() if not where.startswith(ON_DEMAND.get(top, " "))}


def test_every_import_is_a_dependency_or_an_extra() -> None:
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    declared = modules_of(distributions(PROJECT["dependencies"] + extras)) | COME_ALONG | BROUGHT_ALONG
    missing = {top: where for top, where in third_party(runtime=False).items() if top not in declared}
    assert not missing


def test_every_dependency_is_used() -> None:
    # The server's speed-ups are used by uvicorn, by name, and the reader of forms by starlette.
    used = set(third_party(runtime=False)) | {"uvloop", "httptools", "python_multipart"}
    assert not modules_of(distributions(PROJECT["dependencies"])) - used


def test_the_doctor_looks_for_every_dependency() -> None:
    from bough.cli.doctor import REQUIRED

    names = {name.lower().replace("_", "-") for name in REQUIRED}
    assert names | {"torch"} == distributions(PROJECT["dependencies"])


def test_every_dependency_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = distributions(lines)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines)
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    assert not distributions(PROJECT["dependencies"] + extras) - pinned
