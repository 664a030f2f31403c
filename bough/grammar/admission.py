"""What a constraint may cost, checked before any parser sees it."""

from __future__ import annotations

import json
from typing import Any

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import Limits

ALTERNATIVES = ("anyOf", "oneOf", "allOf", "enum", "prefixItems", "items", "required")
"""Keywords whose value may be a list that a grammar branches over or walks along."""


def check_constraint(constraint: Constraint, limits: Limits) -> None:
    """Raises InvalidRequest that names the kind, and where one is to blame the keyword."""
    kind, text = constraint.kind, constraint.text
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} is not valid Unicode", param=kind) from None
    if size > limits.constraint_bytes:
        raise InvalidRequest(f"{kind} has {size} bytes; at most {limits.constraint_bytes} are allowed", param=kind)
    if "\0" in text:
        raise InvalidRequest(f"{kind} holds a NUL character", param=kind)
    if kind in ("regex", "grammar"):
        if not text:
            raise InvalidRequest(f"{kind} is empty", param=kind)
        if _depth(text, "([{", ")]}") > limits.constraint_depth:
            raise InvalidRequest(f"{kind} is nested more than {limits.constraint_depth} deep", param=kind)
    elif kind != "json_object":
        if _depth(text, "[{", "]}") > 2 * limits.constraint_depth:
            raise InvalidRequest(f"{kind} is nested more than {limits.constraint_depth} deep", param=kind)
        _check_json(kind, parse(constraint), limits)


def parse(constraint: Constraint) -> Any:
    """The JSON value of the constraint's text, of the shape that its kind has. Raises InvalidRequest."""
    kind = constraint.kind
    try:
        value = json.loads(constraint.text)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{kind} is not valid JSON", param=kind) from None
    match kind:
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
                raise InvalidRequest("choice must be a list of strings that is not empty", param=kind)
        case "json_schema":
            if not isinstance(value, dict | bool):
                raise InvalidRequest("json_schema must be an object or a boolean", param=kind)
    return value


def _check_json(kind: str, value: Any, limits: Limits) -> None:
    """Bounds on the parts of a JSON value; walks without recursion."""
    if kind == "choice" and len(value) > limits.constraint_alternatives:
        raise _too_many(kind, "choice", len(value), limits.constraint_alternatives)
    stack = [value]
    total = 0
    while stack:
        node = stack.pop()
        total += 1
        if isinstance(node, list):
            stack += node
        if not isinstance(node, dict):
            continue
        for keyword in ALTERNATIVES:
            items = node.get(keyword)
            if isinstance(items, list) and len(items) > limits.constraint_alternatives:
                raise _too_many(kind, keyword, len(items), limits.constraint_alternatives)
        properties = node.get("properties")
        if isinstance(properties, dict) and len(properties) > limits.constraint_properties:
            raise _too_many(kind, "properties", len(properties), limits.constraint_properties)
        stack += node.values()
    if total > limits.constraint_nodes:
        raise InvalidRequest(f"{kind} has {total} parts; at most {limits.constraint_nodes} are allowed", param=kind)


def _too_many(kind: str, keyword: str, n: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"{kind}: {keyword} has {n} entries; at most {most} are allowed", param=kind)


def _depth(text: str, opening: str, closing: str) -> int:
    """Upper bound of how deep brackets nest; those inside strings count too."""
    depth = deepest = 0
    for char in text:
        if char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing and depth:
            depth -= 1
    return deepest
