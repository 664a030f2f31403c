"""From a Python type, or a JSON Schema, to the constraint that an answer be of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from bough.base.constraint import Constraint


def as_constraint(wanted: Any) -> Constraint:
    """The constraint that ``wanted`` stands for.

    It may be a Constraint; a JSON Schema as a mapping; a Pydantic class (anything with ``model_json_schema``); any
    other type that msgspec has a schema for: a Struct, a dataclass, a TypedDict, an Enum, ``list[int]``, a Literal.
    Raises TypeError for the rest.
    """
    if isinstance(wanted, Constraint):
        return wanted
    if isinstance(wanted, Mapping):
        return Constraint(kind="json_schema", text=json.dumps(wanted, ensure_ascii=False))
    if callable(schema := getattr(wanted, "model_json_schema", None)):
        return Constraint(kind="json_schema", text=json.dumps(schema(), ensure_ascii=False))
    return Constraint(kind="json_schema", text=json.dumps(msgspec.json.schema(wanted), ensure_ascii=False))
