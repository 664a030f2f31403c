"""Numbers of a schema that the grammar library does not take as they are written.

It reads every number as a double, not always the nearest one, and writes it with the fewest digits that tell it from
others; only bounds of integers are counted exactly.
"""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from bough.base.errors import InvalidRequest

DIGITS = 15
"""Significant digits that every double keeps."""
TENS = 22
"""Powers of ten up to this one are doubles, so that a number of so few digits is read exactly."""
LEAST_INTEGER, MOST_INTEGER = 2048 - 2**63, 2**63 - 1
"""The library knows no integer range that begins below, and ends one that goes on beyond at the latter."""

LARGEST = 9 * 10**18
"""Nor does it know bounds of numbers beyond."""

HALF_OPEN = 10**18 - 1
"""Nor ranges without an end that begin here or farther from 0."""

_SMALLEST = Decimal(10) ** -TENS
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def is_exact(value: float) -> bool:
    """Whether the library takes ``value`` as what it is, among integers too."""
    if isinstance(value, float) and not math.isfinite(value):
        return True  # what parses to it is refused elsewhere
    if abs(value) > MOST_INTEGER:
        return False
    if isinstance(value, int) and Decimal(repr(float(value))) == value:
        return True
    _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
    return len(digits) <= DIGITS and abs(int(exponent)) <= TENS


def has_inexact(value: Any) -> bool:
    """Whether the library would take any number in ``value`` as another one."""
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        elif isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, int | float) and not isinstance(node, bool) and not is_exact(node):
            return True
    return False


def exact_bounds(schema: dict[str, Any]) -> None:
    """Move the bounds of ``schema`` inwards to where the library takes them as they are, and lets nothing through that
    is outside. Raises InvalidRequest where the library knows no number within."""
    kinds = schema.get("type")
    integers = isinstance(kinds, str | list) and "integer" in kinds and "number" not in kinds
    least, most = (LEAST_INTEGER, MOST_INTEGER) if integers else (-LARGEST, LARGEST)
    for end, lower in (("Minimum", True), ("Maximum", False)):
        exclusive, inclusive = f"exclusive{end}", end.lower()
        for word in (exclusive, inclusive) if integers else ():
            if isinstance(value := schema.get(word), float) and value.is_integer():
                schema[word] = int(value)
        if integers and isinstance(beyond := schema.get(exclusive), int) and abs(beyond) >= 2**53:
            del schema[exclusive]
            within, own = beyond + (1 if lower else -1), schema.get(inclusive)
            if not isinstance(own, int | float) or (own < within) == lower:
                schema[inclusive] = within
        for word in (exclusive, inclusive):
            value = schema.get(word)
            if type(value) is int or isinstance(value, float) and math.isfinite(value):
                inner = (_inner_integer if integers else _inner_number)(value, lower)
                if inner > most if lower else inner < least:
                    raise InvalidRequest(f"{word} is beyond the numbers that can be enforced: {value}")
                schema[word] = inner
    for words, others, limit, sign in ((_LOWER, _UPPER, most, 1), (_UPPER, _LOWER, least, -1)):
        far = any(isinstance(bound := schema.get(word), int | float) and sign * bound >= HALF_OPEN for word in words)
        if far and all(schema.get(word) is None for word in others):
            schema[others[0]] = limit


def _inner_integer(value: float, lower: bool) -> float:
    if lower and value < LEAST_INTEGER:
        return LEAST_INTEGER
    if isinstance(value, float) or abs(value) >= MOST_INTEGER:
        return value
    near = float(value)
    if near != value and (near < value) == lower:
        near = math.nextafter(near, math.inf if lower else -math.inf)
    return int(near)


def _inner_number(value: float, lower: bool) -> float:
    if (value < -LARGEST) if lower else (value > LARGEST):
        return -LARGEST if lower else LARGEST
    if is_exact(value):
        return value
    inwards = ROUND_CEILING if lower else ROUND_FLOOR
    rounded = Context(DIGITS, inwards).create_decimal(Decimal(str(value)))
    if abs(rounded) < 1 and not is_exact(float(rounded)):
        rounded = rounded.quantize(_SMALLEST, inwards)
    return int(rounded) if isinstance(value, int) else float(rounded)


def leave_out_inexact(schema: Any) -> list[str]:
    """Remove ``const`` and ``enum`` that have numbers which cannot be enforced; their names. Changes ``schema``."""
    stack, left = [(schema, False)], dict[str, None]()
    while stack:
        node, named = stack.pop()
        if isinstance(node, list):
            stack += [(item, False) for item in node]
        elif isinstance(node, dict):
            for word in () if named else ("const", "enum"):
                if word in node and has_inexact(node[word]):
                    del node[word]
                    left[word] = None
            stack += [
                (part, key in _NAMED and not named)
                for key, part in node.items()
                if named or key not in ("const", "enum")
            ]
    return list(left)
