"""Structural tags: free text in which certain tags open constrained parts, for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.formats import exact_schema

TEXT = "TEXT: /(.|\\n)*/"


class Structure(msgspec.Struct, forbid_unknown_fields=True):
    """One constrained part; ``schema`` or ``grammar`` (Lark) describes what is between ``begin`` and ``end``."""

    begin: str
    end: str = ""
    schema: dict[str, Any] | bool | None = None
    grammar: str | None = None


class Tags(msgspec.Struct):
    """The text of a constraint of kind structural_tag."""

    structures: list[Structure]
    triggers: list[str]
    at_least_one: bool = False
    stop_after_first: bool = False


def grammar_of_tags(constraint: Constraint, special: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """The constraint's language in llguidance's notation: a Lark grammar, and those that parts of it bring along.

    ``special`` has the texts and ids of the special tokens, which mean themselves where they occur in a tag;
    ``options`` are the library's for JSON Schema. Raises InvalidRequest for a structure that no trigger opens, or
    that is not described.
    """
    tags = parse_tags(constraint)
    sides: dict[str, str] = {}
    larks, opened = ["%llguidance {}", TEXT], []
    names = {id(s): f"part_{i}" for i, s in enumerate(tags.structures)}
    for i, trigger in enumerate(tags.triggers):
        parts = [s for s in tags.structures if s.begin.startswith(trigger)]
        if not parts:
            continue
        rests = " | ".join(_sequence(_text(s.begin[len(trigger) :], special), names[id(s)]) for s in parts)
        pieces = _pieces(trigger, special)
        if isinstance(pieces[0], int):
            head = _sequence("TEXT", _text(trigger, special))
        else:
            # The text before a trigger ends at its first occurrence.
            larks.append(f"head_{i}[lazy]: TEXT {json.dumps(pieces[0], ensure_ascii=False)}")
            head = _sequence(f"head_{i}", _text(trigger[len(pieces[0]) :], special))
        larks.append(f"tag_{i}: {head} ({rests})")
        opened.append(f"tag_{i}")
    for s in tags.structures:
        if not any(s.begin.startswith(trigger) for trigger in tags.triggers):
            raise InvalidRequest(f"structural_tag: no trigger opens {s.begin!r}", param="structural_tag")
        body = _sequence(_body(s, f"side_{names[id(s)]}", options, sides), _text(s.end, special))
        larks.append(f"{names[id(s)]}: {body}")
    first = " | ".join(_sequence(_text(s.begin, special), names[id(s)]) for s in tags.structures)
    more = "" if tags.stop_after_first else f"({' | '.join(opened)})* TEXT"
    if tags.at_least_one:
        start = _sequence(f"({first})", more)
    elif tags.stop_after_first:
        start = f"{' | '.join(opened)} | TEXT"
    else:
        start = more
    grammars = [{"name": "tags", "lark_grammar": "\n".join([*larks, f"start: {start}"])}]
    grammars += [{"name": name, "lark_grammar": lark} for name, lark in sides.items()]
    return json.dumps({"grammars": grammars})


def parse_tags(constraint: Constraint) -> Tags:
    """Its structures and triggers. Raises InvalidRequest."""
    try:
        tags = msgspec.json.decode(constraint.text, type=Tags)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"structural_tag: {error}", param="structural_tag") from None
    if not tags.structures or not tags.triggers or not all(tags.triggers):
        raise InvalidRequest("structural_tag needs structures and triggers", param="structural_tag")
    return tags


def _body(s: Structure, name: str, options: Mapping[str, Any], sides: dict[str, str]) -> str:
    if (s.schema is None) == (s.grammar is None):
        raise InvalidRequest(f"structural_tag: {s.begin!r} needs a schema or a grammar", param="structural_tag")
    if s.grammar is not None:
        sides[name] = s.grammar
        return f"@{name}"
    schema = exact_schema(s.schema) if isinstance(s.schema, dict) else {} if s.schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': dict(options)}, ensure_ascii=False)}"


def _pieces(text: str, special: Mapping[str, int]) -> list[str | int]:
    """``text`` cut into plain text and ids of special tokens; the longest token first where several fit."""
    found = [t for t in sorted(special, key=len, reverse=True) if t and t in text]
    if not found:
        return [text] if text else []
    parts = re.split("(" + "|".join(map(re.escape, found)) + ")", text)
    return [special[part] if i % 2 else part for i, part in enumerate(parts) if part]


def _text(text: str, special: Mapping[str, int]) -> str:
    pieces = _pieces(text, special)
    return " ".join(f"<[{p}]>" if isinstance(p, int) else json.dumps(p, ensure_ascii=False) for p in pieces)


def _sequence(*parts: str) -> str:
    return " ".join(part for part in parts if part)
