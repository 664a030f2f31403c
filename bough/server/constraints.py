"""The many ways in which clients constrain an answer -> one :class:`Constraint`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, get_args

import msgspec

from bough.base.constraint import Constraint, ConstraintKind
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS, Limits
from bough.grammar.admission import check_constraint, check_parts, check_size
from bough.server.schema import Constrained, NativeSampling, StructuredOutputs
from bough.text.tools.constraint import CallGrammar
from bough.text.tools.families import BY_NAME
from bough.text.tools.schema import Unwritable

ANY_OBJECT = "$$ANY$$"
"""SGLang's way to ask for any JSON object."""

CHECKED_CHARS = 16384
"""Longer constraints are checked by the engine, in the background: here everybody else would wait."""

STYLES = {"qwen_xml": "qwen3-coder", "minimax_xml": "minimax-m2"}
"""xgrammar's names for ways to write arguments, and the chat families that do."""

KINDS = get_args(ConstraintKind)

Found = list[tuple[str, Constraint]]


def constraint_of(body: Constrained, limits: Limits) -> Constraint | None:
    """What ``body`` asks for, None if nothing. Raises InvalidRequest that names the field."""
    return _only(_found(body), limits)


def field_of(body: Constrained) -> str | None:
    """The field of ``body`` that constrains the answer."""
    return next((name for name, _ in _found(body)), None)


@contextmanager
def own_names(body: Constrained) -> Iterator[None]:
    """Has what the engine refuses of the constraint name the field of ``body`` that it came from, not its kind."""
    try:
        yield
    except InvalidRequest as error:
        if error.param in KINDS:
            error.param = field_of(body)
        raise


def _found(body: Constrained) -> Found:
    found = _simple(body)
    if body.response_format is not None:
        found += _response_format(body.response_format)
    if body.structured_outputs is not None:
        found += _structured_outputs(body.structured_outputs)
    spacing = "fixed" if body.guided_whitespace_pattern is None else _spacing(body.guided_whitespace_pattern)
    if body.guided_json is not None:
        found.append(("guided_json", _json_schema(body.guided_json, "guided_json", spacing)))
    if body.guided_regex is not None:
        found.append(("guided_regex", Constraint(kind="regex", text=body.guided_regex)))
    if body.guided_choice is not None:
        found.append(("guided_choice", _choice(body.guided_choice)))
    if body.guided_grammar is not None:
        found.append(("guided_grammar", Constraint(kind="grammar", text=body.guided_grammar)))
    return found


def native_constraint(sampling: NativeSampling, limits: Limits) -> Constraint | None:
    """The same for SGLang's ``sampling_params``."""
    return _only(_simple(sampling), limits)


def _only(found: Found, limits: Limits) -> Constraint | None:
    if len(found) > 1:
        raise InvalidRequest(f"{found[0][0]} and {found[1][0]} exclude each other", param=found[1][0])
    if not found:
        return None
    [(name, constraint)] = found
    try:
        if len(constraint.text) > CHECKED_CHARS:
            check_size(constraint, limits)
        else:
            _check(constraint, limits)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=name) from None
    return constraint


@lru_cache(maxsize=256)
def _check(constraint: Constraint, limits: Limits) -> None:
    """:func:`check_constraint`, of what is asked for again and again only once."""
    check_constraint(constraint, limits)


def _simple(body: Constrained | NativeSampling) -> Found:
    """SGLang's fields."""
    found: Found = []
    if body.json_schema == ANY_OBJECT:
        found.append(("json_schema", Constraint(kind="json_object")))
    elif body.json_schema is not None:
        found.append(("json_schema", _json_schema(body.json_schema, "json_schema")))
    if body.regex is not None:
        found.append(("regex", Constraint(kind="regex", text=body.regex)))
    if body.ebnf is not None:
        found.append(("ebnf", Constraint(kind="grammar", text=body.ebnf)))
    if body.structural_tag is not None:
        found.append(("structural_tag", _structural_tag(body.structural_tag, "structural_tag")))
    return found


def _response_format(value: dict[str, Any]) -> Found:
    name = "response_format"
    match value.get("type"):
        case "text":
            return []
        case "json_object":
            return [(name, Constraint(kind="json_object"))]
        case "structural_tag":
            return [(name, _structural_tag(value, name))]
        case "json_schema":
            wanted = value.get("json_schema")
            if not isinstance(wanted, dict) or not isinstance(schema := wanted.get("schema"), dict):
                raise InvalidRequest(f"{name}.json_schema.schema must be an object", param=name)
            return [(name, _json_schema(schema, name, strict=bool(wanted.get("strict"))))]
    raise InvalidRequest(f"{name}.type must be text, json_object, json_schema or structural_tag", param=name)


def _structured_outputs(value: StructuredOutputs) -> Found:
    """vLLM's structured_outputs."""
    name = "structured_outputs"
    spacing = "fixed" if value.whitespace_pattern is None else _spacing(value.whitespace_pattern)
    if value.disable_additional_properties:
        raise InvalidRequest(
            f"{name}.disable_additional_properties is not supported: say additionalProperties in the schema",
            param=f"{name}.disable_additional_properties",
        )
    if value.backend not in (None, "auto"):
        raise InvalidRequest(f"{name}.backend is chosen when the server is started", param=f"{name}.backend")
    if value.disable_any_whitespace:
        spacing = "compact"
    found: Found = []
    if value.json is not None:
        found.append((f"{name}.json", _json_schema(value.json, name, spacing)))
    if value.json_object:
        found.append((f"{name}.json_object", Constraint(kind="json_object", whitespace=spacing)))
    if value.regex is not None:
        found.append((f"{name}.regex", Constraint(kind="regex", text=value.regex)))
    if value.choice is not None:
        found.append((f"{name}.choice", _choice(value.choice)))
    if value.grammar is not None:
        found.append((f"{name}.grammar", Constraint(kind="grammar", text=value.grammar)))
    if value.structural_tag is not None:
        found.append((f"{name}.structural_tag", _structural_tag(value.structural_tag, name)))
    if not found:
        raise InvalidRequest(
            f"{name} needs one of json, json_object, regex, choice, grammar and structural_tag", param=name
        )
    return found


def _json_schema(
    value: str | dict[str, Any] | bool, name: str, spacing: str = "fixed", strict: bool = True
) -> Constraint:
    text = value if isinstance(value, str) else _dump(value, name)
    return Constraint(kind="json_schema", text=text, strict=strict, whitespace=spacing)


def _choice(values: list[str]) -> Constraint:
    return Constraint(kind="choice", text=_dump(values, "choice"))


def _structural_tag(value: str | dict[str, Any], name: str) -> Constraint:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest(f"{name}: the structural tag is not a JSON object", param=name) from None
    if (form := value.get("format")) is not None:
        try:  # before grammars are written of it
            check_size(_tag({"format": form}, name), DEFAULT_LIMITS)
            check_parts("structural_tag", form, DEFAULT_LIMITS)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=name) from None
        return _tag({"format": _without_styles(form, name)}, name)
    known = ("structures", "triggers", "at_least_one", "stop_after_first")
    return _tag({key: value[key] for key in known if key in value}, name)


def _without_styles(form: Any, name: str) -> Any:
    """A structural tag's format, in which arguments that a chat family writes without JSON are grammars."""
    stack = [form]
    grammars = {style: CallGrammar(BY_NAME[family], {}) for style, family in STYLES.items()}
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack += node
        if not isinstance(node, dict):
            continue
        style = "qwen_xml" if node.get("type") == "qwen_xml_parameter" else node.get("style")
        if node.get("type") in ("json_schema", "qwen_xml_parameter") and isinstance(style, str) and style in STYLES:
            schema = node.get("json_schema")
            if not isinstance(schema, dict):
                raise InvalidRequest(f"{name}: json_schema of style {style} must be an object", param=name)
            try:
                grammar = grammars[style].arguments(schema)
            except InvalidRequest as error:
                raise InvalidRequest(f"{name}: {error.message}", param=name) from None
            except Unwritable as error:
                message = f"{name}: {error.keyword} cannot be enforced in JSON Schema of style {style}"
                raise InvalidRequest(message, param=name) from None
            rest = {key: node[key] for key in node if key not in ("type", "json_schema", "style")}
            node.clear()
            node.update({**rest, "type": "grammar", "grammar": grammar})
        stack += [value for key, value in node.items() if key != "json_schema"]
    return form


def _tag(value: dict[str, Any], name: str) -> Constraint:
    return Constraint(kind="structural_tag", text=_dump(value, name))


def _spacing(pattern: str) -> str:
    return pattern or "compact"


def _dump(value: Any, name: str) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{name} is not valid Unicode", param=name) from None
