"""Structural tags as they travel: texts with tags that open constrained parts, or a format put together from others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """One constrained part; ``schema`` or ``grammar`` (Lark, EBNF) describes what is between ``begin`` and ``end``."""

    begin: str
    end: str = ""
    schema: dict[str, Any] | bool | None = None
    grammar: str | None = None


class Tags(msgspec.Struct):
    """The text of a constraint of kind structural_tag: a ``format`` (see :mod:`bough.grammar.composed`), or tags."""

    structures: list[Structure] = []
    triggers: list[str] = []
    at_least_one: bool = False
    stop_after_first: bool = False
    format: dict[str, Any] | None = None


def parse_tags(constraint: Constraint) -> Tags:
    """Raises InvalidRequest."""
    try:
        tags = msgspec.json.decode(constraint.text, type=Tags)
    except msgspec.DecodeError as error:
        raise refused(str(error)) from None
    if tags.format is None and not (tags.structures and tags.triggers and all(tags.triggers)):
        raise InvalidRequest("structural_tag needs structures and triggers", param="structural_tag")
    if tags.format is not None and (plain := _plain(tags.format)) is not None:
        return plain
    for s in tags.structures:
        if (s.schema is None) == (s.grammar is None):
            raise refused(f"{s.begin!r} needs a schema or a grammar")
    return tags


def _plain(form: Mapping[str, Any]) -> Tags | None:
    """The tags of a format that is the same thing under other names; None for any other."""
    known = {"type", "triggers", "tags", "at_least_one", "stop_after_first"}
    tags = form.get("tags")
    if form.get("type") != "triggered_tags" or not form.keys() <= known or not isinstance(tags, list):
        return None
    structures = []
    for tag in tags:
        match tag:
            case {
                "begin": str(begin),
                "end": str(end),
                "content": {"type": "json_schema", "json_schema": schema, **more},
            }:
                structures.append({"begin": begin, "end": end, "schema": schema})
            case _:
                return None
        if more:
            return None
    try:
        return msgspec.convert({**form, "structures": structures}, Tags)
    except msgspec.ValidationError:
        return None


def refused(message: str) -> InvalidRequest:
    return InvalidRequest(f"structural_tag: {message}", param="structural_tag")
