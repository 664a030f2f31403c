"""Bugs that are put in on purpose: the tests are tested.

Each models something that happened to a serving engine, or that nearly happened here. A bug is a change of a
few words in the source of one function, so it breaks exactly what it says, and it no longer applies, loudly,
when that function changes.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Edit:
    """In the function ``name`` of ``owner`` (a class or a module), ``old`` becomes ``new``."""

    owner: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Bug:
    """``incident`` says what it is modelled on."""

    name: str
    incident: str
    edits: tuple[Edit, ...]


def _edited(edit: Edit) -> Any:
    """The function of ``edit``, compiled again with the change."""
    original = inspect.getattr_static(edit.owner, edit.name)
    function: Any = original.fget if isinstance(original, property) else original
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(edit.old) != 1:
        raise LookupError(f"{edit.name} has {source.count(edit.old)} times {edit.old!r}: renew the planted bug")
    scope: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(edit.old, edit.new)
    exec(compile(code, f"<planted in {edit.name}>", "exec"), function.__globals__, scope)
    return scope[edit.name]


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is there while this is open."""
    with ExitStack() as undo:
        for edit in bug.edits:
            before = inspect.getattr_static(edit.owner, edit.name)
            setattr(edit.owner, edit.name, _edited(edit))
            undo.callback(setattr, edit.owner, edit.name, before)
        yield


def simple(name: str, incident: str, owner: Any, function: str, old: str, new: str) -> Bug:
    return Bug(name, incident, (Edit(owner, function, old, new),))
