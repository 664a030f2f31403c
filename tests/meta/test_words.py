"""One name per thing: words that this field uses for several things, and promises, are not written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .source import PACKAGE, modules, native_sources

AMBIGUOUS = re.compile(r"(?<![a-z])slots?(?![a-z])", re.IGNORECASE)
"""A token cell, a page or a table row, depending on whom one asks: say loc, page or row."""

PYTHON_SLOTS = re.compile(r"\bslots=True\b|\b__slots__\b")

PROMISES = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")


def offences(text: str) -> list[str]:
    return [
        f"{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if AMBIGUOUS.search(PYTHON_SLOTS.sub("", line)) or PROMISES.search(line)
    ]


@pytest.mark.parametrize(
    "path", [m.path for m in modules()] + native_sources(), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_file_keeps_to_the_words(path: Path) -> None:
    assert not offences(path.read_text())


@pytest.mark.parametrize("line", ["slot = 1", "n_slots", "# the Slot of a row", "slot_mapping[0]", "# TODO later"])
def test_the_lint_sees(line: str) -> None:
    assert offences(line)


@pytest.mark.parametrize("line", ["@dataclass(slots=True)", "__slots__ = ()", "a slotted spoon", "methodology"])
def test_the_lint_lets_pass(line: str) -> None:
    assert not offences(line)
