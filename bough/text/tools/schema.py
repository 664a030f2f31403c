"""What a JSON Schema says about an argument that is written as text, without the quotes of JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from bough.base.formats import FORMATS
from bough.text.tools.values import TextValue, resolve, types_of

Schema = Mapping[str, Any]

MAX_DEPTH = 16
"""References and alternatives that nest deeper are refused."""
MAX_ALTERNATIVES = 1024
MAX_VALUES = 20_000

ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "deprecated", "readOnly",
                          "writeOnly", "$comment", "$schema", "$id", "$anchor", "$defs", "definitions"))  # fmt: skip
_ROOT = frozenset(("type", "properties", "required", "additionalProperties"))
_STRING = frozenset(("type", "pattern", "format", "minLength", "maxLength"))
_NOT_STRING = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "items",
                         "prefixItems", "minItems", "maxItems", "uniqueItems", "properties", "required",
                         "additionalProperties", "patternProperties", "minProperties", "maxProperties"))  # fmt: skip
"""Keywords that say nothing about a string."""
_TYPES = ("string", "number", "boolean", "null", "array", "object")

SPACE = r"[\s\x1c-\x1f]*"
"""White space, as Python sees it."""
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_SCALARS = {"integer": _NUMBER, "number": _NUMBER, "boolean": "(?:[Tt]rue|[Ff]alse)", "null": "(?:null|None)"}
_HEADS = {"array": r"\[", "object": r"\{", "string": '"'}
"""What texts are, or begin with, that are read as JSON of a type."""

_HEX = "[0-9a-fA-F]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PATH = f"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%{_HEX}{{2}})*"
_PATTERNS = {
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",
    "uri": rf"^[A-Za-z][A-Za-z0-9+.-]*://{_LABEL}(?:\.{_LABEL})*(?::[0-9]{{1,5}})?(?:/{_PATH})?(?:\?{_PATH})?(?:#{_PATH})?$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
}
"""Further formats (RFC 4122, RFC 2673 section 3.2, the dot-atoms of RFC 5322, URIs of RFC 3986 with a host name)."""

_TOKEN = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?(?:[:]|<[A-Za-z]\w*>)|.", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|.", re.DOTALL)
_CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}


class Unwritable(Exception):
    """What a keyword asks cannot be enforced in arguments that are written as text."""

    def __init__(self, keyword: str) -> None:
        super().__init__(keyword)
        self.keyword = keyword


@dataclass(slots=True)
class Forms:
    """The ways to write one argument, any of which will do.

    Attributes:
        patterns: strings: each entry has regular expressions that a whole text must all match; () for any text.
        strings: further strings.
        others: schemas of values that are written as JSON.
    """

    patterns: list[tuple[str, ...]] = field(default_factory=list)
    strings: list[str] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)

    def any_text(self, value: TextValue) -> bool:
        """Whether each text is one of them, whichever of its types ``value`` reads it as."""
        if value.is_string or () not in self.patterns:
            return () in self.patterns
        plain = {other["type"] for other in self.others if other.keys() == {"type"}}
        plain |= {"string", "integer"} if "number" in plain else {"string"}
        return (value.types or frozenset(_TYPES)) <= plain


def object_schema(schema: Schema) -> Schema:
    """The schema of all arguments without references and ``allOf`` around it. Raises Unwritable."""
    flat, *more = islice(_flat(schema, schema, 0), 2)
    if more:
        raise Unwritable(next((word for word in ("anyOf", "oneOf", "type") if word in schema), "anyOf"))
    if flat.get("type", "object") != "object":
        raise Unwritable("type")
    _known(flat, _ROOT)
    declared, required = flat.get("properties", {}), flat.get("required", [])
    if not isinstance(declared, Mapping):
        raise Unwritable("properties")
    if not isinstance(required, list) or not all(isinstance(name, str) and name in declared for name in required):
        raise Unwritable("required")
    if flat.get("additionalProperties") not in (None, True, False, {}):
        raise Unwritable("additionalProperties")
    return {**flat, **references(schema)}


def references(schema: Schema) -> dict[str, Any]:
    """The parts of a whole schema that others refer to."""
    return {word: schema[word] for word in ("$defs", "definitions") if word in schema}


def forms(spec: Any, root: Schema) -> Forms:
    """How a value of ``spec``, which is part of ``root``, may be written. Raises Unwritable."""
    found, n = Forms(), 0
    for i, flat in enumerate(_flat(spec, root, 0)):
        if i == MAX_ALTERNATIVES:
            raise Unwritable("anyOf")
        kind = flat.get("type")
        if "enum" in flat or "const" in flat:
            values = _values(flat)
            n += len(values)
            if n > MAX_VALUES:
                raise Unwritable("enum")
            found.strings += [value for value in values if isinstance(value, str)]
            if rest := [value for value in values if not isinstance(value, str)]:
                found.others.append({"enum": rest})
            continue
        if kind in (None, "string"):
            found.patterns.append(_patterns(flat))
        if kind is None:
            found.others += [{**flat, "type": other} for other in _TYPES[1:]]
        elif kind != "string":
            found.others.append(flat)
    return found


def read_differently(value: TextValue, end: str) -> list[str]:
    """Terminals for the texts before ``end`` that ``value`` may read as something other than themselves.

    Among them are those that go on behind a number or a constant as ``end`` begins: a lexer, which takes the longest
    match, could not tell these from the number with its end.
    """
    if value.is_string:
        return []
    types = value.types or frozenset(_TYPES)
    scalars = dict.fromkeys(part for kind, part in _SCALARS.items() if kind in types)
    return [
        *(f"/{SPACE}{part}{SPACE}/ (/{literal(end[0])}/ BYTES)?" for part in scalars),
        *(f"/{SPACE}{head}/ BYTES" for kind, head in _HEADS.items() if kind in types),
    ]


def _flat(spec: Any, root: Schema, depth: int) -> Iterator[dict[str, Any]]:
    """Schemas without references, combinations and lists of types, one of which holds where ``spec`` does."""
    if spec is True:
        spec = {}
    if not isinstance(spec, Mapping):
        raise Unwritable("false" if spec is False else "$ref")
    if depth > MAX_DEPTH:
        raise Unwritable("$ref" if "$ref" in spec else "anyOf")
    rest = {word: part for word, part in spec.items() if word not in ANNOTATIONS and not word.startswith("x-")}
    if "$ref" in rest:
        reference = rest.pop("$ref")
        target = resolve(reference, root) if isinstance(reference, str) else None
        yield from _flat(_merged(rest, target, "$ref"), root, depth + 1)
    elif "allOf" in rest:
        parts = rest.pop("allOf")
        for part in parts if isinstance(parts, list) else ():
            rest = _merged(rest, part, "allOf")
        yield from _flat(rest, root, depth + 1)
    elif (word := next((word for word in ("anyOf", "oneOf") if word in rest), None)) is not None:
        choices = rest.pop(word)
        if not isinstance(choices, list) or not choices:
            raise Unwritable(word)
        seen: set[str] = set()
        for choice in choices:
            kinds: set[str] = set()
            for flat in _flat(_merged(rest, choice, word), root, depth + 1):
                kinds |= _kinds(flat)
                yield flat
            # A value that two of the choices allow is none of oneOf.
            if word == "oneOf" and kinds & seen:
                raise Unwritable("oneOf")
            seen |= kinds
    elif isinstance(types := rest.get("type"), list):
        if not types or not all(isinstance(kind, str) for kind in types):
            raise Unwritable("type")
        yield from ({**rest, "type": kind} for kind in types)
    elif not isinstance(rest.get("type", ""), str):
        raise Unwritable("type")
    else:
        yield rest


def _merged(one: Schema, other: Any, keyword: str) -> dict[str, Any]:
    """What satisfies both; a keyword that both have is beyond this."""
    if other is True:
        other = {}
    if not isinstance(other, Mapping):
        raise Unwritable(keyword)
    both = {word: part for word, part in other.items() if word not in ANNOTATIONS}
    if any(word in one and one[word] != part for word, part in both.items()):
        raise Unwritable(keyword)
    return {**one, **both}


def _kinds(flat: Schema) -> set[str]:
    kinds: set[str] = set(_TYPES)
    if "type" in flat:
        kinds = {flat["type"]}
    elif "enum" in flat or "const" in flat:
        kinds = {kind for value in _values(flat) for kind in types_of(value)}
    return kinds | {"number"} if "integer" in kinds else kinds


def _known(flat: Schema, words: frozenset[str]) -> None:
    for word in flat:
        if word not in words:
            raise Unwritable(word)


def _values(flat: Schema) -> list[Any]:
    """The values that ``enum`` or ``const`` leaves, of the type that is declared."""
    word = "const" if "const" in flat else "enum"
    values = [flat["const"]] if word == "const" else flat["enum"]
    _known(flat, frozenset((word, "type")))
    if not isinstance(values, list):
        raise Unwritable(word)
    return [value for value in values if flat.get("type") is None or flat["type"] in types_of(value)]


def _patterns(flat: Schema) -> tuple[str, ...]:
    """Regular expressions for the strings of ``flat``, which has no alternatives."""
    _known(flat, _STRING | _NOT_STRING)
    found = []
    least, most = flat.get("minLength", 0), flat.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        raise Unwritable("minLength" if not isinstance(least, int) else "maxLength")
    if least > 0 or most is not None:
        found.append(f"(?s:.{{{max(least, 0)},{'' if most is None else most}}})")
    if "pattern" in flat:
        found.append(whole(flat["pattern"]))
    if "format" in flat:
        name = flat["format"]
        if isinstance(name, str) and name in _PATTERNS:
            found.append(whole(_PATTERNS[name]))
        elif isinstance(name, str) and name in FORMATS:
            found += [expression for part in FORMATS[name] for expression in _patterns(part)]
        else:
            raise Unwritable("format")
    return tuple(found)


def whole(pattern: Any) -> str:
    """What ``pattern``, of ECMA 262 and found anywhere in a text, matches as a whole text, in Rust's notation.

    Raises Unwritable for look-around, back references and anchors elsewhere than at the ends.
    """
    if not isinstance(pattern, str):
        raise Unwritable("pattern")
    parts, depth = [["(?s:.*)", "", "(?s:.*)"]], 0
    for found in _TOKEN.finditer(pattern):
        token, behind = found[0], pattern[found.end() : found.end() + 1]
        part = parts[-1]
        if depth == 0 and token == "^" and part[0] and not part[1]:
            part[0] = ""
        elif depth == 0 and token == "$" and behind in ("", "|"):
            part[2] = ""
        elif depth == 0 and token == "|":
            parts.append(["(?s:.*)", "", "(?s:.*)"])
        elif token in ("^", "$") or token == "(" and behind == "?":
            raise Unwritable("pattern")
        else:
            depth += token[0] == "("
            depth -= token == ")"
            part[1] += _translated(token)
    return "|".join(f"{head}(?:{body}){tail}" for head, body, tail in parts)


def _translated(token: str) -> str:
    if token[0] == "\\":
        return _escape(token)
    if token == ".":
        return r"[^\n\r\x{2028}\x{2029}]"
    if token[0] != "[":
        return _plain(token)
    head = 2 if token.startswith("[^") else 1
    inner = token[head:-1]
    if len(token) == 1 or not inner or "--" in inner:
        raise Unwritable("pattern")
    pieces = (_escape(t) if t[0] == "\\" else f"\\{t}" if t in "[&~^" else _plain(t) for t in _IN_CLASS.findall(inner))
    return f"{token[:head]}{''.join(pieces)}]"


def _escape(token: str) -> str:
    char = token[1:]
    if char in _CLASSES:
        return _CLASSES[char]
    if char in ("<", ">"):
        return char
    if not char or char.isalnum() and char not in "sStnrfvuxpP":
        raise Unwritable("pattern")
    return token if char.isascii() and char.isprintable() else _plain(char)


def _plain(token: str) -> str:
    return {"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(token, token)


def literal(text: str) -> str:
    """The regular expression that matches just ``text``."""
    return "".join(json.dumps(char)[1:-1] if char in "\n\r\t" else re.escape(char) for char in text).replace("/", r"\/")
