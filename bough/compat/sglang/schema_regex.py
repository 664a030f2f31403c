"""A regular expression for the JSON texts of a schema, for programs that ask for one."""

from __future__ import annotations

import json
import re
from typing import Any

_STRING = r'"([^"\\\x00-\x1F\x7F-\x9F]|\\["\\])*"'
_INTEGER = r"(-)?(0|[1-9][0-9]*)"
_NUMBER = rf"({_INTEGER})(\.[0-9]+)?([eE][+-][0-9]+)?"
_PLAIN = {"string": _STRING, "integer": _INTEGER, "number": _NUMBER, "boolean": "(true|false)", "null": "null"}


def regex_of(schema: dict[str, Any], space: str) -> str:
    """Of the common part of JSON Schema, properties in their order. Raises ValueError for the rest, and recursion."""
    return _of(schema, schema.get("$defs", schema.get("definitions", {})), space, ())


def _of(schema: dict[str, Any], definitions: dict[str, Any], space: str, above: tuple[str, ...]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in above:
            raise ValueError(f"the type {name} contains itself, which no regular expression can express")
        return _of(definitions[name], definitions, space, (*above, name))
    if "const" in schema:
        return re.escape(json.dumps(schema["const"]))
    if "enum" in schema:
        return "(" + "|".join(re.escape(json.dumps(value)) for value in schema["enum"]) + ")"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return "(" + "|".join(_of(part, definitions, space, above) for part in schema[key]) + ")"
    kind = schema.get("type")
    if isinstance(kind, list):
        return "(" + "|".join(_of({**schema, "type": k}, definitions, space, above) for k in kind) + ")"
    if kind == "string" and "pattern" in schema:
        return f'"{schema["pattern"].removeprefix("^").removesuffix("$")}"'
    if kind == "string" and ("maxLength" in schema or "minLength" in schema):
        most = schema.get("maxLength", "")
        return _STRING[:-2] + f'{{{schema.get("minLength", 0)},{most}}}"'
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind == "array":
        item = _of(schema.get("items", {"type": "string"}), definitions, space, above)
        low, high = int(schema.get("minItems", 0)), schema.get("maxItems")
        more = f"{{{max(0, low - 1)},{'' if high is None else max(0, int(high) - 1)}}}"
        items = f"({item})({space},{space}({item})){more}"
        return rf"\[{space}{items}{space}\]" if low else rf"\[{space}({items})?{space}\]"
    if kind == "object" or "properties" in schema:
        return _object(schema, definitions, space, above)
    raise ValueError(f"the schema {schema!r} cannot be made a regular expression")


def _object(schema: dict[str, Any], definitions: dict[str, Any], space: str, above: tuple[str, ...]) -> str:
    required = set(schema.get("required", schema["properties"]))
    text, begun = "", False
    for name, value in schema["properties"].items():
        pair = f"{space}{re.escape(json.dumps(name))}{space}:{space}{_of(value, definitions, space, above)}"
        if name in required:
            text += f"{space},{pair}" if begun else pair
            begun = True
        else:
            text += f"({space},{pair})?" if begun else f"({pair}{space},)?"
    return rf"\{{{text}{space}\}}"
