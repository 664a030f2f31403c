"""Writes tool calls as the models of a family do: what :mod:`bough.text.tools.parser` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bough.text.tools.format import Arguments, CallId, Envelope, Family, Format, Name, Parameters, Part, Serial
from bough.text.tools.values import Notation, is_bare, quoted

Call = tuple[str, Mapping[str, Any]]
"""(name, arguments)."""


def write_calls(family: Family, calls: Sequence[Call]) -> str:
    """The text of an answer that consists of ``calls``."""
    form = family.formats[0]
    written = [_write_call(form, call, index) for index, call in enumerate(calls)]
    if form.separator is not None and not form.between:
        return _section(form, form.separator.join(written))
    return form.between.join(_section(form, call) for call in written)


def _section(form: Format, calls: str) -> str:
    return "".join((form.opens, form.brackets[0], calls, form.brackets[1], form.closes))


def _write_call(form: Format, call: Call, index: int) -> str:
    return "".join(_write_part(part, call, index) for part in form.call)


def _write_part(part: Part, call: Call, index: int) -> str:
    name, arguments = call
    match part:
        case str():
            return part
        case Name():
            return name
        case Serial():
            return str(index)
        case CallId():
            return ""
        case Envelope(key):
            return json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        case Parameters():
            return "".join(
                f"{part.before}{key}{part.between}{_text(value)}{part.after}" for key, value in arguments.items()
            )
        case Arguments(None):
            return json.dumps(arguments, ensure_ascii=False)
        case Arguments(notation):
            assert notation is not None
            pairs = (
                f"{_name(notation, key)}{notation.assign}{_value(notation, value)}" for key, value in arguments.items()
            )
            return notation.bracket + (", " if notation.escapes else ",").join(pairs) + notation.end


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(notation: Notation, value: Any) -> str:
    comma, colon = (", ", ": ") if notation.escapes else (",", ":")
    match value:
        case str() if notation.escapes:
            return f'"{quoted(value)}"'
        case str() if notation.quotes[0] not in value:
            return f"{notation.quotes[0]}{value}{notation.quotes[0]}"
        case bool() | None if notation.escapes:
            return str(value)
        case list():
            return f"[{comma.join(_value(notation, item) for item in value)}]"
        case dict():
            pairs = (f"{_key(notation, key)}{colon}{_value(notation, item)}" for key, item in value.items())
            return f"{{{comma.join(pairs)}}}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _key(notation: Notation, key: str) -> str:
    return f'"{quoted(key)}"' if notation.escapes else _name(notation, key)


def _name(notation: Notation, name: str) -> str:
    """``name`` bare where it can be read so."""
    return name if is_bare(name) and not name.startswith(notation.quotes) else f'"{quoted(name)}"'
