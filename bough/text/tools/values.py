"""Values of arguments, as models write them, turned into JSON text while they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bough.text.reader import Mismatch, Parse, Reader, Sink, literals

MAX_DEPTH = 64
"""Arguments that nest deeper are not read as such."""

_PLAIN = re.compile(r'(?:[^"\\]++|\\(?s:.))*+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPED_OR_CONTROL = re.compile(r"(\\[^\x00-\x1f])|(\\?)([\x00-\x1f])")
_FLAT = re.compile(r'(?:[^"{}\[\]]++|"(?:[^"\\\x00-\x1f]++|\\[^\x00-\x1f])*+")*+')
_UNQUOTED = {quote: re.compile(rf"(?:[^{quote}\\]++|\\[^xuU])*+") for quote in ("'", '"')}
_SIMPLE_ESCAPE = re.compile(r"\\([^xuU])")
_SCALAR = re.compile(r"[^\s,{}\[\]\"]*+")
_WORD = re.compile(r"[^\s,()\[\]{}\"':=]*+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": "",
            "\\": "\\", "'": "'", '"': '"'}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}


def quoted(text: str) -> str:
    """``text`` as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_bare(name: str) -> bool:
    """Whether ``name`` can stand without quotes as the name of an argument."""
    return bool(name) and _WORD.fullmatch(name) is not None


def is_object(text: str) -> bool:
    """Whether ``text`` is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


_CONTROLS = {chr(code): quoted(chr(code)) for code in range(32)}


# JSON, passed on as it was written


def json_value(reader: Reader, sink: Sink) -> Parse:
    """Pass on one JSON value; control characters in its strings, and backslashes before them, are escaped, which
    models forget.

    Otherwise only strings and brackets are looked at. Raises Mismatch where the value ends too early or nests too
    deeply.
    """
    yield from reader.space()
    head = yield from reader.char()
    if head == '"':
        yield from _json_string(reader, sink)
    elif head in ("{", "["):
        yield from _json_nested(reader, sink)
    else:
        scalar = yield from reader.run(_SCALAR)
        if not scalar:
            raise Mismatch("expected a JSON value")
        sink(scalar)


def _json_nested(reader: Reader, sink: Sink) -> Parse:
    open_brackets: list[str] = []
    while True:
        if flat := reader.take_match(_FLAT):
            sink(flat)
        head = yield from reader.char()
        if not head:
            raise Mismatch("the text ended within the arguments")
        if head == '"':
            yield from _json_string(reader, sink)
            continue
        if head in "{[":
            open_brackets.append("}" if head == "{" else "]")
            if len(open_brackets) > MAX_DEPTH:
                raise Mismatch(f"the arguments nest deeper than {MAX_DEPTH} levels")
        elif head in "}]" and head != open_brackets.pop():
            raise Mismatch(f"unexpected {head!r} in the arguments")
        elif head not in "}]":
            continue  # flat text that has just arrived
        reader.skip(1)
        sink(head)
        if not open_brackets:
            return


def _json_string(reader: Reader, sink: Sink) -> Parse:
    reader.skip(1)
    sink('"')
    while True:
        if plain := reader.take_match(_PLAIN):
            sink(_ESCAPED_OR_CONTROL.sub(_escaped, plain) if _CONTROL.search(plain) else plain)
        head = yield from reader.char()
        if not head:
            raise Mismatch("the text ended within a string")
        if head == '"':
            reader.skip(1)
            sink('"')
            return
        if head == "\\":
            if len((yield from reader.ahead(2))) < 2:
                raise Mismatch("the text ended within a string")


def _escaped(found: re.Match[str]) -> str:
    """An escape as it is; a control character, and a backslash before it, which escapes nothing, as escapes."""
    return found[1] or found[2] * 2 + _CONTROLS[found[3]]


def json_text(reader: Reader) -> Generator[None, None, str]:
    """Take one JSON string and return what it says. Raises Mismatch for anything else."""
    yield from reader.space()
    if (yield from reader.char()) != '"':
        raise Mismatch("expected a JSON string")
    parts: list[str] = []
    yield from _json_string(reader, parts.append)
    try:
        return msgspec.json.decode("".join(parts), type=str)
    except (msgspec.DecodeError, UnicodeError):
        raise Mismatch("a JSON string is not valid") from None


# Other notations, translated to JSON


@dataclass(frozen=True, slots=True)
class Notation:
    """How a family writes values where it does not write JSON.

    Attributes:
        quotes: what begins and ends a string.
        escapes: strings have Python's backslash escapes (and may be tripled); otherwise they are verbatim.
        bracket, end: around the arguments.
        assign: between the name and the value of an argument.
    """

    quotes: tuple[str, ...]
    escapes: bool
    bracket: str
    end: str
    assign: str


PYTHON = Notation(("'", '"'), True, "(", ")", "=")
"""Keyword arguments of a Python call; positional ones do not exist."""

GEMMA = Notation(("<escape>",), False, "{", "}", ":")
GEMMA_4 = Notation(('<|"|>',), False, "{", "}", ":")
"""Bare keys, and strings between tokens of their own."""


class Translator:
    """Turns the arguments of one call in ``notation`` into a JSON object."""

    def __init__(self, reader: Reader, notation: Notation, sink: Sink) -> None:
        self._reader = reader
        self._notation = notation
        self._sink = sink

    def arguments(self) -> Parse:
        """From behind the opening bracket to behind the closing one.

        Nothing is passed on before the first name, and what assigns to it, were there: a call in prose has neither.
        """
        yield from self._pairs(self._notation.end, self._notation.assign, 1)

    def _pairs(self, end: str, assign: str, depth: int) -> Parse:
        first = True
        while True:
            yield from self._reader.space()
            if (yield from self._reader.char()) == end:
                self._reader.skip(1)
                self._sink("{}" if first else "}")
                return
            if not first:
                yield from self._reader.literal(",")
                yield from self._reader.space()
                if (yield from self._reader.char()) == end:
                    continue
            key = yield from self._key()
            yield from self._reader.literal(assign)
            self._sink(f'{"{" if first else ", "}"{quoted(key)}": ')
            yield from self._value(depth)
            first = False

    def _key(self) -> Generator[None, None, str]:
        yield from self._reader.space()
        if (yield from self._reader.char()) == '"' and not self._notation.escapes:
            return (yield from json_text(self._reader))
        quote = yield from self._reader.choice(self._notation.quotes)
        if quote is not None:
            parts: list[str] = []
            yield from self._string(quote, parts.append)
            return "".join(parts)
        key = yield from self._reader.run(_WORD)
        if not key:
            raise Mismatch("expected the name of an argument")
        return key

    def _value(self, depth: int) -> Parse:
        if depth > MAX_DEPTH:
            raise Mismatch(f"the arguments nest deeper than {MAX_DEPTH} levels")
        yield from self._reader.space()
        if (yield from self._reader.char()) == '"' and not self._notation.escapes:
            text = yield from json_text(self._reader)
            self._sink(f'"{quoted(text)}"')
            return
        quote = yield from self._reader.choice((*self._notation.quotes, "{", "[", "("))
        if quote is None:
            word = yield from self._reader.run(_WORD)
            if not word:
                raise Mismatch("expected a value")
            self._sink(_word(word))
        elif quote == "{":
            yield from self._pairs("}", ":", depth + 1)
        elif quote in ("[", "("):
            yield from self._items("]" if quote == "[" else ")", depth + 1)
        else:
            self._sink('"')
            yield from self._string(quote, lambda text: self._sink(quoted(text)))
            self._sink('"')

    def _items(self, end: str, depth: int) -> Parse:
        self._sink("[")
        first = True
        while True:
            yield from self._reader.space()
            if (yield from self._reader.char()) == end:
                self._reader.skip(1)
                self._sink("]")
                return
            if not first:
                yield from self._reader.literal(",")
                yield from self._reader.space()
                if (yield from self._reader.char()) == end:
                    continue
                self._sink(", ")
            yield from self._value(depth)
            first = False

    def _string(self, quote: str, sink: Sink) -> Parse:
        """The text behind an opening ``quote``, without its end, into ``sink``."""
        reader = self._reader
        if self._notation.escapes and (yield from reader.ahead(2)).startswith(quote * 2):
            reader.skip(2)
            quote *= 3
        elif self._notation.escapes and (yield from reader.char()) == quote:
            reader.skip(1)
            return
        if not self._notation.escapes:
            if (yield from reader.until(literals(quote), sink)) is None:
                raise Mismatch("the text ended within a string")
            return
        while True:
            if plain := reader.take_match(_UNQUOTED[quote[0]]):
                sink(_SIMPLE_ESCAPE.sub(_unescaped, plain))
            head = yield from reader.char()
            if not head:
                raise Mismatch("the text ended within a string")
            if head == "\\":
                reader.skip(1)
                sink((yield from self._escape()))
            elif head == quote[0]:
                if (yield from reader.ahead(len(quote))) == quote:
                    reader.skip(len(quote))
                    return
                reader.skip(1)
                sink(head)

    def _escape(self) -> Generator[None, None, str]:
        """What a Python escape means, from behind its backslash."""
        head = yield from self._reader.char()
        if not head:
            raise Mismatch("the text ended within a string")
        self._reader.skip(1)
        if (size := _CODES.get(head)) is not None:
            digits = yield from self._reader.ahead(size)
            if len(digits) == size and all(d in "0123456789abcdefABCDEF" for d in digits):
                code = int(digits, 16)
                if code <= 0x10FFFF and not 0xD800 <= code < 0xE000:
                    self._reader.skip(size)
                    return chr(code)
            return "\\" + head
        return _ESCAPES.get(head, "\\" + head)


def _unescaped(escape: re.Match[str]) -> str:
    return _ESCAPES.get(escape[1], escape[0])


def _word(word: str) -> str:
    """A bare word as JSON: a constant, a number, or, failing that, a string."""
    if (constant := _CONSTANTS.get(word)) is not None:
        return constant
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        number: int | float = int(word, 0) if len(word) <= 32 else float(word)
    except ValueError:
        try:
            number = float(word)
        except ValueError:
            return f'"{quoted(word)}"'
    # What JSON has no number for stays the word that it was.
    return json.dumps(number) if abs(number) < float("inf") else f'"{quoted(word)}"'


# Values written as text between tags


@dataclass(frozen=True, slots=True)
class TextValue:
    """What the schema of one argument says about its text.

    Attributes:
        types: JSON types that it may have; empty when the schema does not say.
    """

    types: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_string(self) -> bool:
        """The text is the value, so that it can be passed on as it comes."""
        return self.types == {"string"}

    @property
    def is_text(self) -> bool:
        """Any text is a value."""
        return not self.types or "string" in self.types

    def convert(self, text: str) -> str:
        """JSON of the value whose text is ``text``: read as JSON where a type allows it, else a string."""
        bare = text.strip()
        try:
            value = msgspec.json.decode(bare)
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            constant = _CONSTANTS.get(bare)
            if constant is not None and (not self.types or ("null" if constant == "null" else "boolean") in self.types):
                return constant
            return f'"{quoted(text)}"'
        if self.types and not self.types & types_of(value):
            return f'"{quoted(text)}"'
        return bare


def types_of(value: Any) -> frozenset[str]:
    """The JSON types that ``value`` has: 1 is an integer and a number."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number", "integer")) if value.is_integer() else frozenset(("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
        case _:
            return frozenset(("object",))


def text_value(schema: Mapping[str, Any], name: str) -> TextValue:
    """The rule for the argument ``name`` of a tool whose parameters have ``schema``."""
    properties = _properties(schema)
    spec = properties.get(name) if isinstance(properties, Mapping) else None
    return TextValue(frozenset(_declared(spec, schema, 0)))


def _properties(schema: Mapping[str, Any]) -> Any:
    """Its properties, also where they are behind references and ``allOf``."""
    stack, most = [schema], 64
    while stack and most:
        node, most = stack.pop(), most - 1
        if isinstance(node, Mapping):
            if "properties" in node:
                return node["properties"]
            parts = node.get("allOf")
            stack += [*(parts if isinstance(parts, list) else ()), resolve(str(node.get("$ref", "")), schema)]
    return None


def _declared(spec: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    """Types that ``spec`` declares, alternatives included; nothing where it allows any."""
    if not isinstance(spec, Mapping) or depth > 8:
        return set()
    kind = spec.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    if isinstance(reference := spec.get("$ref"), str):
        return _declared(resolve(reference, root), root, depth + 1)
    values = spec.get("enum", [spec["const"]] if "const" in spec else None)
    if isinstance(values, list):
        return {kind for value in values for kind in types_of(value)}
    if isinstance(parts := spec.get("allOf"), list):
        return next((types for part in parts if (types := _declared(part, root, depth + 1))), set())
    for word in ("anyOf", "oneOf"):
        if isinstance(choices := spec.get(word), list):
            found = [_declared(choice, root, depth + 1) for choice in choices]
            return set().union(*found) if all(found) else set()
    return set()


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """The part of ``root`` that ``reference`` means; None where there is none."""
    node: Any = root
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ():
        node = node.get(part) if isinstance(node, Mapping) else None
    return None if node is root else node
