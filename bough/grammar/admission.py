"""What a constraint may cost, checked before any parser sees it."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Generator, Iterator
from decimal import Decimal
from typing import Any

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import Limits
from bough.base.numbers import DIGITS, MOST_INTEGER, is_exact
from bough.grammar.whitespace import written_whitespace

ALTERNATIVES = ("anyOf", "oneOf", "allOf", "enum", "prefixItems", "items", "required")
"""Keywords whose value may be a list that a grammar branches over or walks along."""

LEAST_NUMBER = -9e18
"""A number below, but as the lower end of a range, makes llguidance recurse without end, which nothing can catch."""
VALUES = frozenset(("const", "enum"))
UPPER_ENDS, LOWER_ENDS = frozenset(("maximum", "exclusiveMaximum")), frozenset(("minimum", "exclusiveMinimum"))

_NUMBERED = VALUES | UPPER_ENDS | LOWER_ENDS
_BOUNDED = frozenset((*ALTERNATIVES, "minItems", "multipleOf", "$ref", "properties"))

_BRACKETS, _JSON_BRACKETS = re.compile(r"[()\[\]{}]"), re.compile(r"[\[\]{}]")
_RULE = re.compile(r"\s*+[?!]?([A-Za-z_][\w-]*+)[^:\"/]*+:")
"""The head of a rule; both notations want each on a line of its own."""
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_EMBEDDED = re.compile(r"%json\s*")

SPACINGS = ("fixed", "compact", "free")
"""Names of spacings; others are patterns."""

STEP = 64
"""Parts of a constraint that are looked at in one step, which takes about a tenth of a millisecond."""


def check_constraint(constraint: Constraint, limits: Limits) -> None:
    """Raises InvalidRequest that names the kind, and where one is to blame the keyword.

    Takes some 20 ms for the largest that is allowed.
    """
    deque(check_steps(constraint, limits))


def check_steps(constraint: Constraint, limits: Limits) -> Iterator[None]:
    """:func:`check_constraint` in small steps, between which others may have Python's lock.

    Only the parsing of the text, 2 ms for the largest, is one step.
    """
    check_size(constraint, limits)
    kind, text = constraint.kind, constraint.text
    if "\0" in text:
        raise InvalidRequest(f"{kind} holds a NUL character", param=kind)
    if kind in ("regex", "grammar"):
        if not text:
            raise InvalidRequest(f"{kind} is empty", param=kind)
        if (yield from _deeper(text, _BRACKETS, limits.constraint_depth)):
            raise InvalidRequest(f"{kind} is nested more than {limits.constraint_depth} deep", param=kind)
        if kind == "grammar":
            yield from _check_grammar(kind, text, limits)
    elif kind != "json_object":
        if (yield from _deeper(text, _JSON_BRACKETS, 2 * limits.constraint_depth)):
            raise InvalidRequest(f"{kind} is nested more than {limits.constraint_depth} deep", param=kind)
        yield
        value = parse(constraint)
        yield
        yield from _check_json(kind, value, limits, constraint.strict)


def check_size(constraint: Constraint, limits: Limits) -> None:
    """What of :func:`check_constraint` takes no time."""
    kind, text = constraint.kind, constraint.text
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} is not valid Unicode", param=kind) from None
    if size > limits.constraint_bytes:
        raise InvalidRequest(f"{kind} has {size} bytes; at most {limits.constraint_bytes} are allowed", param=kind)
    if len(constraint.whitespace) > limits.constraint_whitespace:
        most = limits.constraint_whitespace
        raise InvalidRequest(f"{kind}: the pattern of white space may have {most} characters", param=kind)
    if constraint.whitespace not in SPACINGS:
        try:
            written_whitespace(constraint.whitespace)
        except ValueError as error:
            message = f"{kind}: the pattern of white space may match spaces, \\n, \\r and \\t and nothing else: {error}"
            raise InvalidRequest(message, param=kind) from None


def check_parts(kind: str, value: Any, limits: Limits) -> None:
    """What of :func:`check_constraint` is about the parts of a JSON value, before a constraint is made of it."""
    deque(_check_json(kind, value, limits, strict=False), 0)


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


def _check_json(kind: str, value: Any, limits: Limits, strict: bool = True) -> Iterator[None]:
    """Bounds on the parts of a JSON value; walks without recursion. With ``strict`` all values must be enforceable."""
    if kind == "choice" and len(value) > limits.constraint_alternatives:
        raise _too_many(kind, "choice", len(value), limits.constraint_alternatives)
    if kind == "structural_tag" and isinstance(value, dict):
        parts = value.get("structures")
        if isinstance(parts, list) and len(parts) > limits.constraint_structures:
            raise _too_many(kind, "structures", len(parts), limits.constraint_structures)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and isinstance(text := part.get("grammar"), str):
                yield from _check_grammar(kind, text, limits)
    stack: list[tuple[Any, str]] = [(value, "")] if isinstance(value, dict | list) else []
    references: set[str] = set()
    total, multiple, seen = 1, 1, 0
    while stack:
        node, above = stack.pop()
        seen += 1 + len(node) // STEP
        if seen >= STEP:
            seen = 0
            yield
        total += len(node)
        if total > limits.constraint_nodes:
            raise InvalidRequest(f"{kind} has more than {limits.constraint_nodes} parts", param=kind)
        if isinstance(node, list):
            for item in node:
                if isinstance(item, dict | list):
                    stack.append((item, above))
                elif above:
                    _check_number(kind, above, item, strict)
            continue
        if not _BOUNDED.isdisjoint(node):
            multiple = _check_keywords(kind, node, limits, references, multiple)
        if kind == "structural_tag":
            yield from _check_format(kind, node, limits)
        for key, part in node.items():
            inside = above if above in VALUES else key if key in _NUMBERED else ""
            if isinstance(part, dict | list):
                stack.append((part, inside))
            elif inside:
                _check_number(kind, inside, part, strict)


def _check_number(kind: str, keyword: str, value: Any, strict: bool) -> None:
    if not isinstance(value, int | float):
        return
    trouble = ""
    if keyword in LOWER_ENDS:
        if value >= MOST_INTEGER:  # the library ends every range there
            trouble = "is beyond the numbers that can be enforced"
    elif value < LEAST_NUMBER:
        trouble = f"has a number below {LEAST_NUMBER:g}"
    elif strict and keyword in VALUES and not is_exact(value):
        trouble = f"has a number of more than {DIGITS} digits or beyond 2**63, which cannot be enforced"
    if trouble:
        raise InvalidRequest(f"{kind}: {keyword} {trouble}: {value}"[:256], param=kind)


def _check_keywords(kind: str, node: dict[str, Any], limits: Limits, references: set[str], multiple: int) -> int:
    """Bounds on one schema, of which ``references`` takes in the target; returns ``multiple`` with its multipleOf."""
    for keyword in ALTERNATIVES:
        items = node.get(keyword)
        if isinstance(items, list) and len(items) > limits.constraint_alternatives:
            raise _too_many(kind, keyword, len(items), limits.constraint_alternatives)
    least = node.get("minItems")
    if isinstance(least, int | float) and least > limits.constraint_min_items:
        raise InvalidRequest(
            f"{kind}: minItems is {least}; at most {limits.constraint_min_items} are allowed", param=kind
        )
    if isinstance(step := node.get("multipleOf"), int | float) and 0 < step < math.inf:
        multiple = math.lcm(multiple, _odd(step))
        if multiple > limits.constraint_multiple:
            raise InvalidRequest(f"{kind}: multipleOf has too many digits: {step}", param=kind)
    if isinstance(reference := node.get("$ref"), str):
        references.add(reference)
        if len(references) > limits.constraint_references:
            most = limits.constraint_references
            raise InvalidRequest(f"{kind}: $ref has more than {most} targets", param=kind)
    properties = node.get("properties")
    if isinstance(properties, dict) and len(properties) > limits.constraint_properties:
        raise _too_many(kind, "properties", len(properties), limits.constraint_properties)
    return multiple


def _check_format(kind: str, node: dict[str, Any], limits: Limits) -> Iterator[None]:
    """Bounds on one format of a structural tag."""
    match node:
        case {"type": "grammar", "grammar": str(text)}:
            yield from _check_grammar(kind, text, limits)
        case {"type": "regex", "pattern": str(text)}:
            if (yield from _deeper(text, _BRACKETS, limits.constraint_depth)):
                raise InvalidRequest(f"{kind}: pattern is nested more than {limits.constraint_depth} deep", param=kind)
        case {"type": "repeat", "max": int(most)} if most > limits.constraint_min_items:
            raise InvalidRequest(
                f"{kind}: max is {most}; at most {limits.constraint_min_items} are allowed", param=kind
            )
        case {"type": "repeat", "min": int(least)} if least > limits.constraint_min_items:
            raise InvalidRequest(
                f"{kind}: min is {least}; at most {limits.constraint_min_items} are allowed", param=kind
            )
    for keyword in ("tags", "elements", "rules", "triggers", "excludes", "end"):
        parts = node.get(keyword)
        if isinstance(parts, list) and len(parts) > limits.constraint_structures:
            raise _too_many(kind, keyword, len(parts), limits.constraint_structures)


def _odd(step: float) -> int:
    """The digits of ``step`` without factors of 2 and 5: so many remainders a parser has to tell apart."""
    digits = int("".join(map(str, Decimal(repr(step)).as_tuple().digits)))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def _too_many(kind: str, keyword: str, n: int, most: int) -> InvalidRequest:
    return InvalidRequest(f"{kind}: {keyword} has {n} entries; at most {most} are allowed", param=kind)


def _deeper(text: str, brackets: re.Pattern[str], most: int) -> Generator[None, None, bool]:
    """Whether brackets nest more than ``most`` deep, where those inside strings count too."""
    depth = 0
    for i, match in enumerate(brackets.finditer(text), 1):
        if not i % (8 * STEP):
            yield
        bracket = match[0]
        if bracket in "([{":
            depth += 1
            if depth > most:
                return True
        elif depth:
            depth -= 1
    return False


def _check_grammar(kind: str, text: str, limits: Limits) -> Iterator[None]:
    """Bounds on the rules of a grammar, and on the schemas within it, each after a ``%json``."""
    yield from _check_rules(kind, text, limits)
    decoder = json.JSONDecoder()
    for match in _EMBEDDED.finditer(text):
        try:
            schema, _ = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            continue  # a comment, or what the parser will refuse
        yield
        yield from _check_json(kind, schema, limits)


def _check_rules(kind: str, text: str, limits: Limits) -> Iterator[None]:
    """Bounds on the number of rules in EBNF, whose conversion is slow, and on how long a chain of references is."""
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for i, line in enumerate(text.splitlines(), 1):
        if not i % STEP:
            yield
        if head := _RULE.match(line):
            body = rules.setdefault(head[1], [])
            line = line[head.end() :]
        body += _NAME.findall(line)
    if "::=" in text and len(rules) > limits.constraint_ebnf_rules:
        raise _too_many(kind, "EBNF", len(rules), limits.constraint_ebnf_rules)
    seen: set[str] = set()
    for i, name in enumerate(rules, 1):
        if not i % STEP:
            yield
        path = [iter([name])]
        while path:
            if len(path) > limits.constraint_chain + 1:
                most = limits.constraint_chain
                raise InvalidRequest(f"{kind}: rules refer to one another more than {most} deep", param=kind)
            following = next((each for each in path[-1] if each in rules and each not in seen), None)
            if following is None:
                path.pop()
            else:
                seen.add(following)
                path.append(iter(rules[following]))
