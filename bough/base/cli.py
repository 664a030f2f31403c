"""argparse generated from the configuration: a field is a flag, a section is a group."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from bough.base.config import Config

C = TypeVar("C", bound=Config)


def _unwrap(annotation: Any) -> tuple[type, tuple[Any, ...]]:
    """(value type, choices) of a field annotation such as ``int | None``, ``Literal[...]`` or ``tuple[str, ...]``."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = typing.get_args(annotation)
        return type(choices[0]), choices
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], ()
    return annotation, ()


def _sections(config: type[Config]) -> list[tuple[str, type]]:
    hints = typing.get_type_hints(config)
    return [(f.name, hints[f.name]) for f in dataclasses.fields(config) if f.name != "limits"]


def add_arguments(
    parser: argparse.ArgumentParser, sections: tuple[str, ...] | None = None, config: type[Config] = Config
) -> None:
    """Add one flag per field of ``sections`` (all by default), grouped by section."""
    for section, cls in _sections(config):
        if sections is not None and section not in sections:
            continue
        group = parser.add_argument_group(section)
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            kind, choices = _unwrap(hints[f.name])
            options: dict[str, Any] = {"type": kind, "default": argparse.SUPPRESS, "help": _help(f)}
            if choices:
                options["choices"] = choices
            if f.default == ():
                options["action"] = "append"
            if f.metadata.get("positional"):
                group.add_argument(f"{section}.{f.name}", nargs="?", metavar=section.upper(), **options)
            else:
                flag = f.name.replace("_", "-")
                group.add_argument(
                    f"--{flag}",
                    dest=f"{section}.{f.name}",
                    **(options if choices else {**options, "metavar": kind.__name__.upper()}),
                )


def _help(f: dataclasses.Field[Any]) -> str:
    text: str = f.metadata["help"]
    return text if f.default in (None, ()) else f"{text} (default: {f.default})"


def from_arguments(arguments: argparse.Namespace, base: C) -> C:
    """A new configuration: ``base`` with what the command line says."""
    given: dict[str, dict[str, Any]] = {}
    for name, value in vars(arguments).items():
        section, dot, field = name.partition(".")
        if dot:
            given.setdefault(section, {})[field] = tuple(value) if isinstance(value, list) else value
    changed = {s: dataclasses.replace(getattr(base, s), **values) for s, values in given.items()}
    return dataclasses.replace(base, **changed)


def arguments_of(given: Mapping[str, Any]) -> list[str]:
    """The command line that says ``given``: fields of any section by their names; None is left out.

    Raises TypeError for a name that is no flag.
    """
    flags = {
        f.name for _, cls in _sections(Config) for f in dataclasses.fields(cls) if not f.metadata.get("positional")
    }
    found = []
    for name, value in given.items():
        if name not in flags:
            raise TypeError(f"{name!r} is not an option of the engine")
        values = value if isinstance(value, list | tuple) else () if value is None else (value,)
        found += [part for one in values for part in (f"--{name.replace('_', '-')}", str(one))]
    return found
