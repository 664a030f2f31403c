"""Structural tags: answers put together from texts, tags, schemas and grammars, as one grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.formats import exact_steps
from bough.grammar.structural import Tags, parse_tags, refused
from bough.grammar.threads import in_pauses

Format = Mapping[str, Any]

FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes", "max_chars"),
    "token": ("token",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content", "min", "max"),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
    "dispatch": ("rules", "loop", "excludes"),
}
"""The formats, which are xgrammar's (https://xgrammar.mlc.ai/docs/), and their fields."""


def grammar_of_tags(constraint: Constraint, special: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """The constraint's language in llguidance's notation: a Lark grammar, and those that parts of it bring along.

    ``special`` has the texts and ids of the special tokens, which mean themselves where they occur in a tag;
    ``options`` are the library's for JSON Schema. Raises InvalidRequest for what cannot be enforced, by its name.
    """
    tags = parse_tags(constraint)
    return _Writer(special, options).grammar(_as_format(tags) if tags.format is None else tags.format)


def _as_format(tags: Tags) -> Format:
    contents = [
        {"type": "json_schema", "json_schema": s.schema}
        if s.grammar is None
        else {"type": "grammar", "grammar": s.grammar}
        for s in tags.structures
    ]
    return {
        "type": "triggered_tags",
        "triggers": tags.triggers,
        "tags": [
            {"type": "tag", "begin": s.begin, "content": content, "end": s.end}
            for s, content in zip(tags.structures, contents, strict=True)
        ],
        "at_least_one": tags.at_least_one,
        "stop_after_first": tags.stop_after_first,
    }


@dataclass(frozen=True, slots=True)
class _Item:
    """One part of a sequence.

    Attributes:
        expr: it, in Lark's notation.
        regular: it can be a part of a lexeme; neighbours that can become one, so that their border is nobody's guess.
        heads: texts, one of which it begins with, that do not occur in the free text before it.
        token: it is a special token, which is in no text.
        open: it ends with text that ends only where one of the two before follows, or the answer ends.
    """

    expr: str
    regular: bool = False
    heads: tuple[str, ...] = ()
    token: bool = False
    open: bool = False


Items = list[_Item]


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, special: Mapping[str, int], options: Mapping[str, Any]) -> None:
        self._special = special
        self._options = dict(options)
        self._rules = ["%llguidance {}", r"BYTES: ~/[^\s\S]/"]
        self._sides: dict[str, str] = {}
        self._parts = 0
        self._writers: dict[str, Callable[[Format, tuple[str, ...]], Items]] = {
            "const_string": lambda form, _: self._text(_str(form, "value")),
            "json_schema": self._json_schema,
            "regex": lambda form, _: _regex(_str(form, "pattern")),
            "grammar": self._grammar,
            "any_text": self._any_text,
            "token": lambda form, _: [self._token(form.get("token"))],
            "sequence": lambda form, stops: self._sequence(_forms(form, "elements"), stops),
            "or": self._or,
            "optional": lambda form, stops: self._repeated(form, "?", stops),
            "plus": lambda form, stops: self._repeated(form, "+", stops),
            "star": lambda form, stops: self._repeated(form, "*", stops),
            "repeat": lambda form, stops: self._repeated(form, _bounds(form), stops),
            "tag": lambda form, stops: [*self._marked(form.get("begin"), "begin"), *self._inside(form, stops)],
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
            "dispatch": self._dispatch,
        }

    def grammar(self, form: Format) -> str:
        start = self._joined(self._items(form, ()))
        grammars = [{"name": "tags", "lark_grammar": "\n".join([*self._rules, f"start: {start}"])}]
        grammars += [{"name": name, "lark_grammar": lark} for name, lark in self._sides.items()]
        return json.dumps({"grammars": grammars})

    def _items(self, form: Any, stops: tuple[str, ...]) -> Items:
        """``form`` as a sequence; free text at its end must not have any of ``stops``, for they follow it."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise refused(f"a format of type {kind!r} is not supported; these are: {', '.join(FIELDS)}")
        _check_fields(form)
        return self._writers[kind](form, stops)

    # Primitives

    def _text(self, text: str) -> Items:
        pieces = self._pieces(text)
        return [
            _Item(f"<[{piece}]>", token=True)
            if isinstance(piece, int)
            else _Item(_quoted(piece), regular=True, heads=(piece,) if i == len(pieces) - 1 else ())
            for i, piece in enumerate(pieces)
        ]

    def _pieces(self, text: str) -> list[str | int]:
        """``text`` cut into plain text and ids of special tokens; the longest token first where several fit."""
        found = [t for t in sorted(self._special, key=len, reverse=True) if t and t in text]
        if not found:
            return [text] if text else []
        parts = re.split("(" + "|".join(map(re.escape, found)) + ")", text)
        return [self._special[part] if i % 2 else part for i, part in enumerate(parts) if part]

    def _token(self, token: Any) -> _Item:
        found = self._special.get(token) if isinstance(token, str) else token
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise refused(f"token: {token!r} is no id and no special token of this model")
        return _Item(f"<[{found}]>", token=True)

    def _json_schema(self, form: Format, stops: tuple[str, ...]) -> Items:
        schema = form.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise refused("json_schema.json_schema must be a schema")
        if form.get("style", "json") != "json":
            raise refused(f"json_schema.style {form['style']!r} is not supported")
        if form.get("any_order"):
            raise refused("json_schema.any_order is not supported: properties come in the order of the schema")
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        in_pauses(exact_steps(schema))
        own = schema.get("x-guidance")
        options = {**(own if isinstance(own, dict) else {}), **self._options}
        return [_Item(f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")]

    def _grammar(self, form: Format, stops: tuple[str, ...]) -> Items:
        name = f"side_{len(self._sides)}"
        self._sides[name] = any_to_lark(_str(form, "grammar"))
        return [_Item(f"@{name}")]

    def _any_text(self, form: Format, stops: tuple[str, ...]) -> Items:
        most = form.get("max_chars")
        if most is not None and (not isinstance(most, int) or most < 0):
            raise refused("any_text.max_chars must be a number, at least 0")
        return [self._free((*stops, *_texts(form, "excludes")), most)]

    def _free(self, barred: Sequence[str], most: int | None = None) -> _Item:
        """Text without any of ``barred``."""
        body = "/(?s:.*)/" if most is None else f"/(?s:.{{0,{most}}})/"
        barred = [text for text in dict.fromkeys(barred) if text]
        expr = " & ".join([body, *(f"~(BYTES {_quoted(text)} BYTES)" for text in barred)])
        return _Item(self._named("FREE", expr), regular=True, open=True)

    # Compositions

    def _sequence(self, forms: Sequence[Any], stops: tuple[str, ...]) -> Items:
        items: Items = []
        for form in reversed(forms):
            items = self._items(form, items[0].heads if items else stops) + items
        return items

    def _or(self, form: Format, stops: tuple[str, ...]) -> Items:
        forms = _forms(form, "elements")
        if not forms:
            raise refused("or.elements is empty")
        return [self._either([self._items(each, stops) for each in forms])]

    def _either(self, ways: Sequence[Items]) -> _Item:
        regular = all(item.regular for way in ways for item in way)
        heads = tuple(head for way in ways if way for head in way[0].heads)
        known = all(way and way[0].heads for way in ways)
        exprs = [_regular(way) if regular else self._joined(way) for way in ways]
        return _Item(
            f"({' | '.join(exprs)})",
            regular=regular,
            heads=heads if regular and known else (),
            token=all(way and way[0].token for way in ways),
            open=any(map(_open, ways)),
        )

    def _repeated(self, form: Format, times: str, stops: tuple[str, ...]) -> Items:
        items = self._items(form.get("content"), stops if times == "?" else ())
        if all(item.regular for item in items):
            return [_Item(f"({_regular(items)}){times}", regular=True, open=_open(items))]
        if _open(items) and times != "?":
            raise _unlimited(form["type"])
        return [_Item(f"({self._joined(items)}){times}", open=_open(items))]

    # Tags

    def _inside(self, form: Format, stops: tuple[str, ...]) -> Items:
        """A tag without its begin."""
        ends = form.get("end")
        ways = [self._marked(end, "end") for end in (ends if isinstance(ends, list) and ends else [ends])]
        end = ways[0] if len(ways) == 1 else [self._either(ways)]
        return [*self._items(form.get("content"), end[0].heads if end else stops), *end]

    def _marked(self, mark: Any, name: str) -> Items:
        """What a tag begins or ends with."""
        if isinstance(mark, Mapping) and mark.get("type") == "token":
            return [self._token(mark.get("token"))]
        if not isinstance(mark, str):
            raise refused(f"tag.{name} must be a text or a token")
        return self._text(mark)

    def _tags(self, form: Format) -> list[tuple[Any, _Item]]:
        """The begins of its tags, and the rest of each."""
        tags = _forms(form, "tags")
        found = []
        for tag in tags:
            if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
                raise refused(f"{form['type']}.tags must be tags")
            _check_fields({**tag, "type": "tag"})
            inside = self._inside(tag, ())
            part = f"part_{self._parts}"
            self._parts += 1
            self._rules.append(f"{part}: {self._joined(inside)}")
            found.append((tag.get("begin"), _Item(part, open=_open(inside))))
        if not found:
            raise refused(f"{form['type']}.tags is empty")
        return found

    def _triggered_tags(self, form: Format, stops: tuple[str, ...]) -> Items:
        triggers, tags = _texts(form, "triggers"), self._tags(form)
        if not triggers or not all(triggers):
            raise refused("triggered_tags.triggers must be texts, at least one")
        opened: dict[str, list[Items]] = {trigger: [] for trigger in triggers}
        for begin, inside in tags:
            trigger = next((each for each in triggers if isinstance(begin, str) and begin.startswith(each)), None)
            if trigger is None:
                raise refused(f"no trigger opens {begin!r}")
            opened[trigger].append([*self._text(begin[len(trigger) :]), inside])
        first = [[*self._text(begin), inside] for begin, inside in tags] if form.get("at_least_one") else []
        once = bool(form.get("stop_after_first"))
        return self._told("triggered_tags", opened, first, once, _texts(form, "excludes"), stops)

    def _dispatch(self, form: Format, stops: tuple[str, ...]) -> Items:
        rules = form.get("rules")
        if not isinstance(rules, list) or not rules or not all(_is_rule(rule) for rule in rules):
            raise refused("dispatch.rules must be pairs of a text and a format, at least one")
        opened: dict[str, list[Items]] = {}
        for text, each in rules:
            opened.setdefault(text, []).append(self._items(each, ()))
        return self._told("dispatch", opened, [], form.get("loop") is False, _texts(form, "excludes"), stops)

    def _told(
        self,
        kind: str,
        opened: Mapping[str, list[Items]],
        first: Sequence[Items],
        once: bool,
        excludes: Sequence[str],
        stops: tuple[str, ...],
    ) -> Items:
        """Free text, in which each text of ``opened`` opens one of its sequences; ``first`` comes before any text."""
        if not once and any(_open(way) for ways in (*opened.values(), first) for way in ways):
            raise _unlimited(kind)
        whole = [text for text in opened if isinstance(self._pieces(text)[0], str) and len(self._pieces(text)) == 1]
        free = self._free((*whole, *excludes, *stops))
        tags = [
            self._rule("tag", f"{self._joined([free, *self._text(text)])} {self._either(ways).expr}")
            for text, ways in opened.items()
            if ways
        ]
        head = [self._either(first)] if first else []
        if first and once:
            return head
        if once:
            return [_Item(f"({' | '.join([*tags, self._joined([free])])})", open=True)]
        return [*head, _Item(f"({' | '.join(tags)})*"), free]

    def _tags_with_separator(self, form: Format, stops: tuple[str, ...]) -> Items:
        tags = [[*self._marked(begin, "begin"), inside] for begin, inside in self._tags(form)]
        if any(map(_open, tags)):
            raise _unlimited("tags_with_separator")
        tag = self._rule("tag", self._either(tags).expr)
        separator = self._joined(self._text(_str(form, "separator")))
        expr = tag if form.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return [_Item(f"({expr})" if form.get("at_least_one") else f"({expr})?")]

    # Rules

    def _joined(self, items: Sequence[_Item]) -> str:
        """``items`` in a rule, where those that are regular and neighbours are one lexeme."""
        parts: list[str] = []
        run: list[_Item] = []
        for i, item in enumerate(items):
            last = items[i - 1] if i else None
            if (
                last is not None
                and not item.token
                and (not item.regular and _open(items[:i]) or last.open and not last.regular)
            ):
                raise refused("any_text must be followed by a fixed text or a token, or end the answer")
            if item.regular:
                run.append(item)
            else:
                parts += [self._lexeme(run)] if run else []
                run = []
                parts.append(item.expr)
        return " ".join([*parts, self._lexeme(run)] if run else parts) or '""'

    def _lexeme(self, items: Sequence[_Item]) -> str:
        return items[0].expr if len(items) == 1 and items[0].expr[0] == '"' else self._named("TEXT", _regular(items))

    def _named(self, name: str, expr: str) -> str:
        if re.fullmatch(r"[A-Z]+_\d+", expr):
            return expr
        return self._rule(name, expr)

    def _rule(self, name: str, expr: str) -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}: {expr}")
        return name


def _check_fields(form: Format) -> None:
    kind = form["type"]
    for name, value in form.items():
        if name != "type" and name not in FIELDS[kind] and value not in (None, False, [], {}):
            raise refused(f"{kind}.{name} is not supported")


def _open(items: Sequence[_Item]) -> bool:
    """Whether ``items`` end with text that nothing in them ends: a head does so right behind it, a token anywhere."""
    waits = fresh = False
    for item in items:
        waits = item.open or waits and not (item.token or fresh and item.heads)
        fresh = item.open
    return waits


def _unlimited(kind: str) -> InvalidRequest:
    return refused(f"any_text cannot end what {kind} repeats")


def _regular(items: Sequence[_Item]) -> str:
    return " ".join(item.expr for item in items) or '""'


def _is_rule(rule: Any) -> bool:
    return isinstance(rule, list) and len(rule) == 2 and isinstance(rule[0], str) and bool(rule[0])


def _bounds(form: Format) -> str:
    least, most = form.get("min"), form.get("max")
    if not isinstance(least, int) or not isinstance(most, int) or least < 0 or (most != -1 and most < max(least, 1)):
        raise refused("repeat needs 0 <= min <= max and a max of at least 1, or of -1")
    return f"{{{least},{'' if most == -1 else most}}}"


def _str(form: Format, name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise refused(f"{form.get('type', 'tag')}.{name} must be a text")
    return value


def _texts(form: Format, name: str) -> list[str]:
    values = form.get(name) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise refused(f"{form['type']}.{name} must be a list of texts")
    return values


def _forms(form: Format, name: str) -> list[Any]:
    values = form.get(name)
    if not isinstance(values, list):
        raise refused(f"{form['type']}.{name} must be a list")
    return values


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> Items:
    tokens = re.findall(r"\\.|.", pattern, re.DOTALL)
    if tokens[-1:] == ["\\"]:
        raise refused("regex.pattern ends with a backslash")
    plain = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
    inner = "".join(plain.get(token, token) for token in tokens)
    return [_Item(f"/{inner}/", regular=True)] if inner else []
