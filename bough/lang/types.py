"""Python types of answers: what the model may write, the value of what it wrote, and of what it wrote so far."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from bough.lang.errors import InvalidAnswer
from bough.lang.ir import SglGen
from bough.lang.params import SglSamplingParams

_INT = r"-?(?:0|[1-9][0-9]{0,17})"
_FLOAT = _INT + r"(?:\.[0-9]{1,17})?"


class Answer:
    """How answers of one type are asked for and read.

    Scalars, Enums and Literals are written plainly and constrained by a regular expression (:mod:`bough.lang.wrapping`
    is for APIs that know none); everything else is JSON and constrained by its schema. Raises TypeError for a type
    that has no schema.
    """

    def __init__(self, wanted: Any) -> None:
        self.wanted = wanted
        self._plain = _plain_values(wanted)
        self.regex: str | None = None
        self.json_schema: str | None = None
        self.value_schema: dict[str, Any] | None = None
        if self._plain is not None:
            self.regex = "|".join(re.escape(text) for text in sorted(self._plain, key=len, reverse=True))
            self.value_schema = {"type": "boolean"} if wanted is bool else {"type": "string", "enum": [*self._plain]}
        elif wanted in (int, float):
            self.regex = _INT if wanted is int else _FLOAT
            self.value_schema = {"type": "integer" if wanted is int else "number"}
        elif wanted is not str:
            self.json_schema = json.dumps(schema_of(wanted), ensure_ascii=False)

    def constrain(self, params: SglSamplingParams) -> None:
        """Make ``params`` ask for answers of this type."""
        params.dtype = None
        if self.regex is not None:
            params.regex, params.value_schema = f"({self.regex})", self.value_schema
        if self.json_schema is not None:
            params.json_schema = self.json_schema

    def parse(self, text: str) -> Any:
        """The value of a complete answer. Raises InvalidAnswer."""
        try:
            if self.wanted is str:
                return text
            if self._plain is not None:
                return self._plain[text if text in self._plain else text.strip()]
            if self.wanted in (int, float):
                return self.wanted(text.strip())
            if isinstance(self.wanted, dict):
                return msgspec.json.decode(text)
            if (adapter := adapter_of(self.wanted)) is not None:
                return adapter.validate_json(text)
            return msgspec.json.decode(text, type=self.wanted)
        except KeyError:
            raise InvalidAnswer(f"it must be one of {', '.join(self._plain or ())}", text) from None
        except ValueError as error:
            raise InvalidAnswer(str(error), text) from error

    def check(self, value: Any, validate: Callable[[Any], object] | None) -> None:
        """Raises InvalidAnswer where ``validate`` raises ValueError, or says False."""
        if validate is None:
            return
        try:
            accepted = validate(value)
        except (ValueError, AssertionError) as error:
            raise InvalidAnswer(str(error) or "it was rejected", _shown(value)) from error
        if accepted is False:
            raise InvalidAnswer("it was rejected", _shown(value))

    def partial(self, text: str) -> Any:
        """The value of an answer that is still being written; None where nothing can be said yet.

        JSON objects of a class become objects with the same attributes, None where they are not yet known.
        """
        if self.json_schema is None:
            try:
                return self.parse(text)
            except InvalidAnswer:
                return None
        found = partial_json(text)
        if found is _NOTHING:
            return None
        if isinstance(self.wanted, dict):
            return found
        try:
            return msgspec.convert(found, partial_type(self.wanted), strict=False)
        except (msgspec.ValidationError, TypeError):
            return None


def answer_of(expr: SglGen) -> Answer | None:
    """How the answer of a gen is read; None where it stays a text."""
    if expr.type is None:
        return Answer(str) if expr.validate is not None else None
    return Answer(expr.type)


def schema_of(wanted: Any) -> dict[str, Any]:
    """The JSON Schema of a type that msgspec or Pydantic knows; a mapping is one already.

    Raises TypeError for a type that has none.
    """
    if isinstance(wanted, dict):
        return dict(wanted)
    return dict(_closed(_schema(wanted)))


@functools.lru_cache(maxsize=1024)
def _schema(wanted: Any) -> Any:
    if not pydantic_reads(wanted):
        return msgspec.json.schema(wanted)
    from pydantic import PydanticUserError

    try:
        return adapter_of(wanted).json_schema()
    except PydanticUserError as error:
        raise TypeError(str(error)) from error


def convert(value: Any, wanted: Any) -> Any:
    """``value``, of the types of JSON, as one of type ``wanted``. Raises ValueError where it is none."""
    adapter = adapter_of(wanted)
    return msgspec.convert(value, wanted) if adapter is None else adapter.validate_python(value)


@functools.lru_cache(maxsize=1024)
def adapter_of(wanted: Any) -> Any:
    """Pydantic's reader of a type that only it can read; None of any other, which msgspec reads."""
    if not pydantic_reads(wanted):
        return None
    from pydantic import TypeAdapter

    return TypeAdapter(wanted)


def pydantic_reads(wanted: Any, inside: tuple[Any, ...] = ()) -> bool:
    """Whether a model of Pydantic occurs in a type, or dataclasses that an answer may be either of; ``inside`` are the
    types that it is a part of."""
    if wanted in inside:
        return False
    parts = list(typing.get_args(wanted))
    if isinstance(wanted, type):
        if hasattr(wanted, "__pydantic_validator__"):
            return True
        if dataclasses.is_dataclass(wanted) or typing.is_typeddict(wanted):
            parts += typing.get_type_hints(wanted).values()
    elif typing.get_origin(wanted) in (typing.Union, types.UnionType) and sum(map(dataclasses.is_dataclass, parts)) > 1:
        return True
    return any(pydantic_reads(part, (*inside, wanted)) for part in parts)


def _closed(schema: Any) -> Any:
    """A schema whose objects have the fields of their types and no others."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def _plain_values(wanted: Any) -> dict[str, Any] | None:
    """Text -> value of the types that have a few values only."""
    if wanted is bool:
        return {"true": True, "false": False, "True": True, "False": False}
    if typing.get_origin(wanted) is typing.Literal:
        return {str(value): value for value in typing.get_args(wanted)}
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return {str(member.value): member for member in wanted}
    return None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


_NOTHING = object()
_OPEN_ESCAPE = re.compile(r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}))?")
"""An escape that is not complete, or is the first half of two."""
_CLOSING = {"{": "}", "[": "]"}


def partial_json(text: str) -> Any:
    """The value of the beginning of a JSON text: as much of it as is certain, with everything closed.

    A string that is not closed is taken as far as it goes; a number or a word at the end may go on, and is left out.
    """
    for candidate in _completions(text.strip()):
        try:
            return json.loads(candidate)
        except ValueError:
            continue
    return _NOTHING


def _completions(text: str) -> Iterable[str]:
    """Ways to end ``text``, the one that keeps the most first."""
    closing: list[str] = []
    inside, escaped, escapes = False, False, list[int]()
    cuts: list[tuple[int, str]] = []
    for i, c in enumerate(text):
        if inside:
            if escaped:
                escaped = False
            elif c == "\\":
                escaped = True
                escapes.append(i)
            elif c == '"':
                inside = False
        elif c == '"':
            inside = True
        elif c in _CLOSING:
            closing.append(_CLOSING[c])
            cuts.append((i + 1, "".join(reversed(closing))))
        elif c in "}]" and closing:
            closing.pop()
            cuts.append((i + 1, "".join(reversed(closing))))
        elif c == ",":
            cuts.append((i, "".join(reversed(closing))))
    rest = "".join(reversed(closing))
    if inside:
        end = len(text)
        for at in reversed(escapes[-2:]):  # of a character beyond 16 bits, which is two escapes, neither alone is one
            if _OPEN_ESCAPE.fullmatch(text, at, end):
                end = at
        yield text[:end] + '"' + rest
    elif not closing or text.endswith(('"', "}", "]")):
        yield text + rest
    for end, close in reversed(cuts):
        yield text[:end] + close


@functools.cache
def partial_type(wanted: Any, inside: tuple[Any, ...] = ()) -> Any:
    """``wanted`` with every field optional, all the way down to a class that occurs in itself, here ``inside``."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (list, set, frozenset) and arguments:
        return types.GenericAlias(list, (partial_type(arguments[0], inside),))
    if origin is dict and len(arguments) == 2:
        return types.GenericAlias(dict, (str, partial_type(arguments[1], inside)))
    if origin in (typing.Union, types.UnionType, tuple) or wanted in inside:
        return Any
    if typing.is_typeddict(wanted):
        return dict[str, Any]
    if isinstance(wanted, type) and (fields := _fields(wanted)) is not None:
        within = (*inside, wanted)
        parts = [(name, partial_type(t, within) | None, None) for name, t in fields.items()]
        return msgspec.defstruct(wanted.__name__, parts)
    return wanted if isinstance(wanted, type) and wanted in (int, float, str, bool) else Any


def _fields(wanted: type) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(wanted) or issubclass(wanted, msgspec.Struct) or hasattr(wanted, "model_fields"):
        hints = typing.get_type_hints(wanted)
        names = getattr(wanted, "model_fields", None) or getattr(wanted, "__dataclass_fields__", None) or hints
        return {name: hints[name] for name in names if name in hints}
    return None
