"""What a family's description says about the answers that are allowed: constraints for the engine.

An answer that must be a call is a grammar in Lark's notation, as llguidance reads it
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md); an answer that may have calls is free text with
structural tags.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.formats import exact_schema
from bough.base.limits import DEFAULT_LIMITS
from bough.base.numbers import leave_out_inexact
from bough.text.reasoning.families import ReasoningFormat
from bough.text.tools.format import Arguments, Envelope, Family, Name, Parameters, Part, Serial
from bough.text.tools.schema import (
    ANNOTATIONS,
    SPACE,
    Forms,
    Unwritable,
    forms,
    literal,
    object_schema,
    read_differently,
    references,
)
from bough.text.tools.values import Notation, TextValue, text_value

Schema = Mapping[str, Any]

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_GUIDANCE = "x-guidance"
"""Where llguidance looks for its options in a schema."""
LENIENT = {_GUIDANCE: {"coerce_one_of": True, "lenient": True}}
"""What is added to the parameters of a tool that is not strict: keywords that cannot be enforced are left out."""
GROUP = 8
"""Arguments of which those behind them make a rule."""
_LINE_ENDS = re.compile(r"^(\n+)")
_ANY = "/(?s:.*)/"
_TERMINALS = (f"TEXT: {_ANY}", r"BYTES: ~/[^\s\S]/")
"""Any text, and any bytes. What must not occur is barred with any bytes behind it: with any text there, the lexer would
have to search the rest of the allowed texts for one that is no text."""
_STRING = TextValue(frozenset(("string",)))


class CallGrammar:
    """Grammar of answers that are calls.

    Args:
        family: how the model writes calls.
        special: texts and ids of the tokenizer's special tokens, which are no text to a grammar.
        most: characters of values that are written in all; InvalidRequest beyond, before there are more.
    """

    def __init__(self, family: Family, special: Mapping[str, int], most: int = DEFAULT_LIMITS.constraint_bytes) -> None:
        self._family = family
        self._form = family.formats[0]
        self._special = special
        found = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._cut = re.compile(f"({found})") if found else None
        self._most = self._left = most
        self._begin()

    def constraint(
        self,
        tools: Mapping[str, Schema],
        *,
        parallel: bool,
        thinking: ReasoningFormat | None = None,
        otherwise: Constraint | None = None,
    ) -> Constraint:
        """The answer is one call of ``tools``, or several where ``parallel``.

        With ``thinking`` it may begin with reasoning; in place of calls, it may be the JSON that ``otherwise`` (of
        kind json_schema or json_object) says.
        """
        start = self._calls(tools, parallel)
        if otherwise is not None:
            schema = json.loads(otherwise.text) if otherwise.text else {"type": "object"}
            if not otherwise.strict and isinstance(schema, dict):
                leave_out_inexact(schema)
                schema |= LENIENT
            bare = self._either(tools, schema)
            answer = " ".join([*self._literal(self._family.answers), self._json(schema)])
            start = f"({start} | {answer})" if bare is None else bare
        return self._grammar(start, thinking)

    def tags(
        self, tools: Mapping[str, Schema], *, parallel: bool, thinking: ReasoningFormat | None = None
    ) -> Constraint:
        """The answer is free, but every call in it keeps to the schema of its tool.

        Where calls have no mark that they begin with, the answer is calls, or text that does not begin like one;
        with ``thinking`` either may follow reasoning.
        """
        if not self._form.trigger:
            calls = self._calls(tools, parallel)
            self._rule("FREE", self._free_text(thinking))
            return self._grammar(f"({calls} | FREE)", thinking)
        structures = [self._structure(name, schema) for name, schema in tools.items()]
        text: dict[str, Any] = {"structures": structures, "triggers": [self._form.trigger]}
        if not parallel:
            text["stop_after_first"] = True
        return Constraint(kind="structural_tag", text=json.dumps(text, ensure_ascii=False))

    def arguments(self, schema: Schema) -> str:
        """Grammar of the parameters of a call as the family writes them, without JSON. Raises Unwritable."""
        self._begin()
        [part] = [part for part in self._form.call if isinstance(part, Parameters)]
        return self._whole(self._arguments(part, schema))

    def _whole(self, items: Sequence[str]) -> str:
        self._rule("start", *items)
        return "\n".join(["%llguidance {}", *self._rules, *_TERMINALS])

    def _calls(self, tools: Mapping[str, Schema], parallel: bool) -> str:
        """What derives the calls of an answer, whose rules are made afresh."""
        self._begin()
        calls = [f"call_{i}" for i in range(len(tools))]
        for self._call, (rule, (name, schema)) in enumerate(zip(calls, tools.items(), strict=True)):
            self._rule(rule, *(item for part in self._form.call for item in self._part(part, name, schema)))
        self._rule("call", " | ".join(calls))
        return self._sections(parallel)

    def _grammar(self, start: str, thinking: ReasoningFormat | None) -> Constraint:
        if thinking is not None:
            self._rule("thinking", *self._thinking(thinking))
            start = f"thinking? {start}"
        grammar = "\n".join(["%llguidance {}", f"start: {start}", *self._rules, *_TERMINALS])
        return Constraint(kind="grammar", text=grammar)

    def _free_text(self, thinking: ReasoningFormat | None) -> str:
        """Text that no format of the family reads as a call, as a terminal."""
        marks = [*self._family.triggers, *([thinking.opens.strip()] if thinking is not None else [])]
        barred = [rf"/{SPACE}[\[{{]/ BYTES", *(f"BYTES /{literal(mark)}/ BYTES" for mark in marks)]
        return " & ".join([_ANY, *(f"~({each})" for each in barred)])

    def _structure(self, name: str, schema: Schema) -> dict[str, Any]:
        """One call of the tool ``name``, in a section of its own, as a structural tag."""
        form = self._form
        begin, end = form.opens.lstrip() + form.brackets[0], form.brackets[1] + form.closes
        body: dict[str, Any] | None = None
        for part in form.call:
            text = ""
            match part:
                case str():
                    text = part
                case Name():
                    text = name
                case Serial():
                    text = "0"
                case Envelope(key):
                    begin += _envelope_head(name, key)
                    body, end = {"schema": dict(schema)}, "}" + end
                case Arguments(None):
                    body = {"schema": dict(schema)}
                case Arguments() | Parameters():
                    self._begin()
                    body = {"grammar": self._whole(self._part(part, name, schema))}
                case _:
                    pass
            if body is None:
                begin += text
            else:
                end = text + end
        return {"begin": begin, "end": end, **(body or {})}

    def _either(self, tools: Mapping[str, Schema], schema: Any) -> str | None:
        """A call or ``schema`` as one JSON value, where calls are bare JSON that begins like any other; else None.

        Such a call cannot be told from the other JSON by a lexer. References are relative to a whole schema, so where
        there are any, only the other JSON is allowed.
        """
        part = self._form.call[0]
        if self._form.trigger or not isinstance(part, Envelope):
            return None
        if any(references(each) for each in (schema, *tools.values()) if isinstance(each, Mapping)):
            return self._json(schema)
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, part.arguments: dict(arguments)},
                "required": ["name", part.arguments],
                "additionalProperties": False,
            }
            for name, arguments in tools.items()
        ]
        lenient = all(isinstance(each, Mapping) and _is_lenient(each) for each in (schema, *tools.values()))
        return self._json({"anyOf": [*calls, schema]} | (LENIENT if lenient else {}))

    def _sections(self, parallel: bool) -> str:
        form = self._form
        opening = self._joined(form.opens + form.brackets[0])
        closing = self._joined(form.brackets[1] + form.closes)
        if not parallel:
            return f"{opening} call {closing}"
        if form.separator is not None and not form.between:
            return f"{opening} call ({self._joined(form.separator)} call)* {closing}"
        return f"{opening} call {closing} ({self._joined(form.between)} {opening} call {closing})*"

    def _part(self, part: Part, name: str, schema: Schema) -> list[str]:
        match part:
            case str():
                return self._literal(part)
            case Name():
                return self._literal(name)
            case Serial():
                return ["/[0-9]+/"]
            case Envelope(key):
                return [*self._literal(_envelope_head(name, key)), self._json(schema), *self._literal("}")]
            case Arguments(None):
                return [self._json(schema)]
            case Parameters() | Arguments():
                try:
                    return self._arguments(part, schema)
                except Unwritable as error:
                    raise InvalidRequest(
                        f"tools: {error.keyword} in the parameters of {name} cannot be enforced for this model's calls",
                        param="tools",
                    ) from None
            case _:
                return []

    def _arguments(self, part: Parameters | Arguments, schema: Schema) -> list[str]:
        """Arguments that are not written as JSON. Raises Unwritable."""
        whole = {**object_schema(schema), **(LENIENT if _is_lenient(schema) else {})}
        self._values.clear()  # those of another call may refer to other definitions
        if isinstance(part, Parameters):
            return self._parameters(part, whole)
        assert part.notation is not None
        return self._keywords(part.notation, whole)

    def _parameters(self, part: Parameters, schema: Schema) -> list[str]:
        items = []
        for key, spec, required in properties(schema):
            head = self._literal(f"{part.before}{key}{part.between}")
            value = text_value(schema, key)
            tail = self._shared(value, spec, partial(self._parameter, part.after, spec, value, schema))
            items.append(_optional([*head, tail], required))
        return items

    def _parameter(self, end: str, spec: Any, value: TextValue, schema: Schema) -> list[str]:
        """A value and ``end``."""
        if not value.is_text:
            return [self._json(_with_references(spec, schema)), *self._literal(end)]
        try:
            return self._written(end, forms(spec, schema), value, schema)
        except Unwritable:
            if not _is_lenient(schema):
                raise
            return self._until(end)

    def _written(self, end: str, found: Forms, value: TextValue, schema: Schema) -> list[str]:
        """A value without quotes that is one of ``found``, and ``end``."""
        if found.any_text(value):
            return self._until(end)
        for text in found.strings:
            if json.loads(value.convert(text)) != text:
                raise Unwritable("enum")
        ways = [] if not found.patterns and not found.strings else [" ".join(self._text(end, found, value))]
        close = self._joined(end)
        ways += [f"{self._json(_with_references(each, schema))} {close}" for each in found.others]
        if not ways:
            raise Unwritable("enum")
        return [f"({' | '.join(ways)})"]

    def _text(self, end: str, found: Forms, value: TextValue) -> list[str]:
        """One of the strings of ``found`` that ``value`` reads as it stands, and ``end``, at its first occurrence."""
        stop = end.strip()
        self._spend(sum(map(len, found.strings)))
        if any(stop in text for text in found.strings):
            raise Unwritable("enum")
        barred = [f"BYTES /{literal(stop)}/ BYTES", *read_differently(value, end)]
        not_barred = [f"~({each})" for each in barred]
        ways = [
            " & ".join([*(f"/{each}/" for each in patterns or ("(?s:.*)",)), *not_barred])
            for patterns in found.patterns
        ]
        ways += [f"/{literal(text)}/" for text in found.strings]
        pieces = [piece for piece in self._pieces(end) if piece]
        inner = "" if pieces[0] in self._special else pieces.pop(0)
        rule = f"TEXT_{len(self._rules)}"
        self._rule(rule, f"({' | '.join(f'({way})' for way in ways)})", *([_quoted(inner)] if inner else []))
        return [rule, *self._literal("".join(pieces))]

    def _keywords(self, notation: Notation, schema: Schema) -> list[str]:
        """Keyword arguments in the order of the schema; the optional ones may be left out."""
        items = self._literal(notation.bracket)
        comma = self._joined(", " if notation.escapes else ",")
        rules = []
        for key, spec, required in properties(schema):
            rule = f"argument_{len(self._rules)}"
            value = self._shared(None, spec, partial(self._value, notation, spec, schema))
            self._rule(rule, *self._literal(key + notation.assign), value)
            rules.append((rule, required))
        if not rules:
            return [*items, *self._literal(notation.end)]
        # Behind an argument come the later ones, each behind a comma; from every GROUP on these are a rule, so that the
        # whole is linear in them and rules do not refer to one another as deep as there are arguments.
        prefix, following = f"later_{len(self._rules)}", [""] * (len(rules) + 1)
        for i in reversed(range(len(rules))):
            rule, required = rules[i]
            following[i] = f"{_optional([comma, rule], required)} {following[i + 1]}"
            if i and i % GROUP == 0:
                self._rule(f"{prefix}_{i}", following[i])
                following[i] = f"{prefix}_{i}"
        first = next((i for i, (_, required) in enumerate(rules) if required), len(rules) - 1)
        ways = [f"{rule} {following[i + 1]}" for i, (rule, _) in enumerate(rules[: first + 1])]
        whole = f"({' | '.join(ways)})"
        return [*items, whole if rules[first][1] else f"{whole}?", *self._literal(notation.end)]

    def _value(self, notation: Notation, spec: Any, schema: Schema) -> list[str]:
        if notation.escapes:
            boolean = text_value({"properties": {"": spec}, **references(schema)}, "").types == {"boolean"}
            if boolean and forms(spec, schema).others == [{"type": "boolean"}]:
                return ['("True" | "False")']
            return [self._json(_with_references(spec, schema))]
        if not text_value({"properties": {"": spec}, **references(schema)}, "").is_text:
            return [self._json(_with_references(spec, schema), _COMPACT)]
        quote = notation.quotes[0]
        try:
            found = forms(spec, schema)
        except Unwritable:
            if not _is_lenient(schema):
                raise
            return [*self._literal(quote), *self._until(quote)]
        ways = [self._json(_with_references(each, schema), _COMPACT) for each in found.others]
        if () in found.patterns:
            ways.append(" ".join([*self._literal(quote), *self._until(quote)]))
        elif found.patterns or found.strings:
            ways.append(" ".join([*self._literal(quote), *self._text(quote, found, _STRING)]))
        if not ways:
            raise Unwritable("enum")
        return [f"({' | '.join(ways)})"]

    def _shared(self, way: TextValue | None, spec: Any, write: Callable[[], Sequence[str]]) -> str:
        """The rule of a value of ``spec``, made by ``write`` for the first that is written the same ``way``."""
        if isinstance(spec, Mapping):
            spec = {word: part for word, part in spec.items() if word not in ANNOTATIONS}
        key = way, json.dumps(spec)
        if key not in self._values:
            items = write()
            self._values[key] = f"value_{self._call}_{len(self._rules)}"
            self._rule(self._values[key], *items)
        return self._values[key]

    def _json(self, schema: Any, spacing: Mapping[str, Any] = _SPACING) -> str:
        text = embedded(schema, spacing)
        self._spend(len(text))
        return text

    def _spend(self, n: int) -> None:
        self._left -= n
        if self._left < 0:
            raise InvalidRequest(f"the grammar of these arguments has more than {self._most} characters", param="tools")

    def _begin(self) -> None:
        """Forget the rules of another grammar."""
        self._rules: list[str] = []
        self._values: dict[tuple[TextValue | None, str], str] = {}
        self._call = 0

    def _thinking(self, thinking: ReasoningFormat) -> list[str]:
        between = "<|start|>assistant" if thinking.channels else "\n\n"
        return [*self._literal(thinking.opens), *self._until(thinking.closes), *self._literal(between)]

    def _until(self, end: str) -> list[str]:
        """Any text up to ``end``, and ``end``."""
        pieces = [piece for piece in self._pieces(end) if piece]
        if pieces[0] in self._special:
            return ["TEXT", *self._literal(end)]
        rule = f"text_{len(self._rules)}"
        self._rules.append(f"{rule}[suffix={_quoted(pieces[0])}]: {_ANY}")
        return [rule, *self._literal("".join(pieces[1:]))]

    def _rule(self, name: str, *items: str) -> None:
        self._rules.append(f"{name}: {' '.join(items)}")

    def _pieces(self, text: str) -> list[str]:
        return self._cut.split(text) if self._cut is not None else [text]

    def _joined(self, text: str) -> str:
        return " ".join(self._literal(text))

    def _literal(self, text: str) -> list[str]:
        """``text`` in the notation of grammars: special tokens by their id, the rest quoted.

        The lexer takes the longest match, so the line ends that several literals begin with are lexemes of their own.
        """
        pieces = [part for piece in self._pieces(text) for part in _LINE_ENDS.split(piece)]
        return [
            f"<[{self._special[piece]}]>" if piece in self._special else _quoted(piece) for piece in pieces if piece
        ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _envelope_head(name: str, key: str) -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": '


def embedded(schema: Any, spacing: Mapping[str, Any] = _SPACING) -> str:
    """A JSON Schema within a grammar."""
    if isinstance(schema, Mapping):
        schema = {
            **exact_schema(copy.deepcopy(dict(schema))),
            _GUIDANCE: {**(LENIENT[_GUIDANCE] if _is_lenient(schema) else {}), **spacing},
        }
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def properties(schema: Schema) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of every argument."""
    declared = schema.get("properties")
    required = schema.get("required")
    names = frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()
    return [(name, spec, name in names) for name, spec in declared.items()] if isinstance(declared, Mapping) else []


def _with_references(spec: Any, schema: Schema) -> Any:
    """``spec`` of the whole ``schema`` by itself."""
    if not isinstance(spec, Mapping):
        return spec
    refers = '"$ref"' in json.dumps(spec)
    return {**spec, **(references(schema) if refers else {}), **(LENIENT if _is_lenient(schema) else {})}


def _is_lenient(schema: Schema) -> bool:
    return schema.get(_GUIDANCE) == LENIENT[_GUIDANCE]


def _optional(items: Sequence[str], required: bool) -> str:
    return " ".join(items) if required else f"({' '.join(items)})?"
