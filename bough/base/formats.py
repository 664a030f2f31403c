"""What the library takes too widely in a schema, or cannot count, said in words that it gets right.

The library lets 29 February through in every year, second 60 in every minute and international labels that decode to
nothing; it rounds bounds of many digits and reads classes of characters as Rust does. What stands here is narrower than
the standard where that costs nobody anything: no year 0, no leap second, fractions of at most nine digits, no hyphen
beside another in a host name. Integers begin a little above -2**63.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from bough.base.numbers import exact_bounds

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
"""Two digits that make a multiple of four, but 00."""
_DAYS = (
    f"{_YEAR}-(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    f"{_YEAR}-(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    f"{_YEAR}-02-(?:0[1-9]|1[0-9]|2[0-8])",
    f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29",
)
_DATE = f"(?:{'|'.join(_DAYS)})"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = rf"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOUR}:[0-5][0-9])"
_LABEL = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"

FORMATS: dict[str, tuple[dict[str, Any], ...]] = {
    "date": ({"pattern": f"^{_DATE}$"},),
    "time": ({"pattern": f"^{_TIME}$"},),
    "date-time": ({"pattern": f"^{_DATE}[Tt]{_TIME}$"},),
    "hostname": (
        {"pattern": rf"^{_LABEL}(?:\.{_LABEL})*$", "maxLength": 253},
        {"pattern": r"^[^.]{1,63}(?:\.[^.]{1,63})*$"},
    ),
}
"""Name -> schemas that a string of the format must all satisfy (RFC 3339 section 5.6, RFC 1123 section 2.1)."""

STEP = 256
"""Parts of a schema that are looked at in one step."""

_BOUNDS = frozenset(("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"))

_VALUES = ("const", "enum", "default", "examples")
"""Keywords below which there are values and no schemas."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value has schemas under names."""


_CLASS = re.compile(r"\\.|\[\^?((?:\\.|[^\]\\])+)\]", re.DOTALL)
_OPERATOR = re.compile(r"\\.|--|[\[&~]", re.DOTALL)


def _plain_class(found: re.Match[str]) -> str:
    """A class of ECMA 262 without what Rust reads in it as named classes, classes within it and operators on them."""
    if found[1] is None:
        return found[0]
    head = found[0][: found.start(1) - found.start()]

    def plain(operator: re.Match[str]) -> str:
        if operator[0] == "--":  # the end of a range, or at the beginning the start of one
            return "-\\-" if operator.start() else "\\--"
        return operator[0] if len(operator[0]) > 1 else "\\" + operator[0]

    inner = _OPERATOR.sub(plain, found[1])
    return f"{head}{inner}]"


def exact_schema(schema: Any) -> Any:
    """``schema``, a JSON value, whose formats are patterns as :data:`FORMATS` says, whose patterns are read as ECMA 262
    does, and whose bounds the library takes exactly.

    Changed in place where it has any.
    """
    deque(exact_steps(schema), 0)
    return schema


def exact_steps(schema: Any) -> Iterator[None]:
    """:func:`exact_schema` in small steps, between which others may have Python's lock."""
    stack, n = [(schema, False)], 0
    while stack:
        n += 1
        if not n % STEP:
            yield
        node, named = stack.pop()
        if isinstance(node, list):
            stack += [(item, False) for item in node]
        elif isinstance(node, dict):
            stack += [(part, key in _NAMED and not named) for key, part in node.items() if named or key not in _VALUES]
            if not named and isinstance(pattern := node.get("pattern"), str):
                node["pattern"] = _CLASS.sub(_plain_class, pattern)
            form = None if named else node.get("format")
            if isinstance(form, str) and form in FORMATS:
                del node["format"]
                node["allOf"] = [*(node.get("allOf") or ()), *FORMATS[form]]
            if not named and not _BOUNDS.isdisjoint(node):
                exact_bounds(node)


def with_exact_schema(text: str, go: Callable[[Iterator[None]], object] = deque) -> str:
    """The same for JSON text; ``go`` goes through the steps."""
    if not any(word in text for word in ('"format"', '"pattern"', *(f'"{bound}"' for bound in _BOUNDS))):
        return text
    schema = json.loads(text)
    go(exact_steps(schema))
    return json.dumps(schema, ensure_ascii=False)
