"""What a family's description says about the answers that are allowed: constraints for the engine.

An answer that must be a call is a grammar in Lark's notation, as llguidance reads it
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md); an answer that may have calls is free text with
structural tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.text.reasoning.families import ReasoningFormat
from bough.text.tools.format import Arguments, Envelope, Family, Name, Parameters, Part, Serial
from bough.text.tools.schema import (
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
    """

    def __init__(self, family: Family, special: Mapping[str, int]) -> None:
        self._family = family
        self._form = family.formats[0]
        self._special = special
        found = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._cut = re.compile(f"({found})") if found else None
        self._rules: list[str] = []

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
                schema |= LENIENT
            bare = self._either(tools, schema)
            answer = " ".join([*self._literal(self._family.answers), embedded(schema)])
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
        self._rules = []
        [part] = [part for part in self._form.call if isinstance(part, Parameters)]
        return self._whole(self._arguments(part, schema))

    def _whole(self, items: Sequence[str]) -> str:
        self._rule("start", *items)
        return "\n".join(["%llguidance {}", *self._rules, *_TERMINALS])

    def _calls(self, tools: Mapping[str, Schema], parallel: bool) -> str:
        """What derives the calls of an answer, whose rules are made afresh."""
        self._rules = []
        calls = [f"call_{i}" for i in range(len(tools))]
        for rule, (name, schema) in zip(calls, tools.items(), strict=True):
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
                    self._rules = []
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
            return embedded(schema)
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
        return embedded({"anyOf": [*calls, schema]} | (LENIENT if lenient else {}))

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
                return [*self._literal(_envelope_head(name, key)), embedded(schema), *self._literal("}")]
            case Arguments(None):
                return [embedded(schema)]
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
        if isinstance(part, Parameters):
            return self._parameters(part, whole)
        assert part.notation is not None
        return self._keywords(part.notation, whole)

    def _parameters(self, part: Parameters, schema: Schema) -> list[str]:
        items = []
        for key, spec, required in properties(schema):
            head = self._literal(f"{part.before}{key}{part.between}")
            value = text_value(schema, key)
            if value.is_text:
                tail = self._text_parameter(part.after, spec, value, schema)
            else:
                tail = [embedded(_with_references(spec, schema)), *self._literal(part.after)]
            items.append(_optional([*head, *tail], required))
        return items

    def _text_parameter(self, end: str, spec: Any, value: TextValue, schema: Schema) -> list[str]:
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
        ways += [f"{embedded(_with_references(each, schema))} {close}" for each in found.others]
        if not ways:
            raise Unwritable("enum")
        return [f"({' | '.join(ways)})"]

    def _text(self, end: str, found: Forms, value: TextValue) -> list[str]:
        """One of the strings of ``found`` that ``value`` reads as it stands, and ``end``, at its first occurrence."""
        stop = end.strip()
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
            self._rule(rule, *self._literal(key + notation.assign), *self._value(notation, spec, schema))
            rules.append((rule, required))
        # From the end: what may follow an argument is the list of the later ones, each behind a comma.
        rest, whole = "", ""
        for rule, required in reversed(rules):
            whole = f"{rule} {rest}" if required or not whole else f"({rule} {rest} | {whole})"
            whole = whole if required else f"({whole})?"
            rest = f"{comma} {rule} {rest}" if required else f"({comma} {rule})? {rest}"
        return [*items, whole, *self._literal(notation.end)] if whole else [*items, *self._literal(notation.end)]

    def _value(self, notation: Notation, spec: Any, schema: Schema) -> list[str]:
        if notation.escapes:
            boolean = text_value({"properties": {"": spec}, **references(schema)}, "").types == {"boolean"}
            if boolean and forms(spec, schema).others == [{"type": "boolean"}]:
                return ['("True" | "False")']
            return [embedded(_with_references(spec, schema))]
        if not text_value({"properties": {"": spec}, **references(schema)}, "").is_text:
            return [embedded(_with_references(spec, schema), _COMPACT)]
        quote = notation.quotes[0]
        try:
            found = forms(spec, schema)
        except Unwritable:
            if not _is_lenient(schema):
                raise
            return [*self._literal(quote), *self._until(quote)]
        ways = [embedded(_with_references(each, schema), _COMPACT) for each in found.others]
        if () in found.patterns:
            ways.append(" ".join([*self._literal(quote), *self._until(quote)]))
        elif found.patterns or found.strings:
            ways.append(" ".join([*self._literal(quote), *self._text(quote, found, _STRING)]))
        if not ways:
            raise Unwritable("enum")
        return [f"({' | '.join(ways)})"]

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
        schema = {**schema, _GUIDANCE: {**(LENIENT[_GUIDANCE] if _is_lenient(schema) else {}), **spacing}}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def properties(schema: Schema) -> list[tuple[str, Any, bool]]:
    """(name, schema, whether it is required) of every argument."""
    declared = schema.get("properties")
    required = schema.get("required")
    names = frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()
    return [(name, spec, name in names) for name, spec in declared.items()] if isinstance(declared, Mapping) else []


def _with_references(spec: Any, schema: Schema) -> Any:
    """``spec`` of the whole ``schema`` by itself."""
    more = references(schema) | (LENIENT if _is_lenient(schema) else {})
    return {**spec, **more} if isinstance(spec, Mapping) else spec


def _is_lenient(schema: Schema) -> bool:
    return schema.get(_GUIDANCE) == LENIENT[_GUIDANCE]


def _optional(items: Sequence[str], required: bool) -> str:
    return " ".join(items) if required else f"({' '.join(items)})?"
