"""Numbers that the library would round are enforced as they are, left out with a warning, or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.base.constraint import Constraint, ConstraintKind
from bough.base.errors import InvalidRequest
from bough.base.formats import exact_schema
from bough.base.limits import DEFAULT_LIMITS
from bough.base.numbers import is_exact, leave_out_inexact
from bough.grammar.admission import check_constraint
from bough.grammar.base import Vocabulary
from bough.grammar.llguidance import LLGuidance

llguidance = pytest.importorskip("llguidance")

BYTES = llguidance.LLTokenizer("byte")
BIG = 1175928847299117063


def allows(schema: Any, text: str) -> bool:
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(exact_schema(schema)))
    matcher = llguidance.LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


@given(
    st.one_of(
        st.integers(-(2**53), 2**53),
        st.integers(-(10**20), 10**20),
        st.decimals(allow_nan=False, allow_infinity=False, places=8).map(float),
    )
)
def test_an_exact_number_is_written_as_itself(value: float) -> None:
    if is_exact(value) and value > -9e18:
        text = str(value) if isinstance(value, int) else f"{value:.20f}".rstrip("0").rstrip(".")
        assert float(text) == value
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps({"const": value}))
        matcher = llguidance.LLMatcher(BYTES, grammar)
        written = bytes(BYTES.decode_bytes(matcher.compute_ff_tokens())).decode()
        assert json.loads(written) == value


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("bound", [5, 2**53 + 1, 12216229312834624, 123456789012345678, -123456789012345677])
def test_bounds_let_nothing_through_that_is_outside(bound: int, lower: bool, exclusive: bool) -> None:
    word = f"exclusive{'Minimum' if lower else 'Maximum'}" if exclusive else "minimum" if lower else "maximum"
    step = -1 if lower else 1
    beyond = bound if exclusive else bound + step
    assert not allows({"type": "integer", word: bound}, str(beyond))
    assert allows({"type": "integer", word: bound}, str(bound - 5_000 * step))


@pytest.mark.parametrize(("word", "bound"), [
    ("exclusiveMaximum", 1e18), ("exclusiveMaximum", 1e16), ("exclusiveMinimum", 1e17), ("exclusiveMinimum", -1e16),
    ("exclusiveMinimum", 9007199254740992.0),
])  # fmt: skip
def test_bounds_of_integers_may_be_written_as_floats(word: str, bound: float) -> None:
    schema = {"type": "integer", word: bound}
    assert not allows(dict(schema), str(int(bound)))
    assert allows(dict(schema), str(int(bound) + (5000 if word == "exclusiveMinimum" else -5000)))


def test_bounds_of_numbers_are_moved_inwards() -> None:
    for word, bound, outside, inside in [
        ("maximum", 123456789012345678, "123456789012345679", "123456789012344000"),
        ("minimum", 123456789012345678, "123456789012345677", "123456789012347000"),
        ("maximum", 0.12345678901234567, "0.12345678901234568", "0.123456789012345"),
        ("exclusiveMinimum", -9.876543210987654, "-9.876543210987654", "-9.87654321098764"),
    ]:
        assert not allows({"type": "number", word: bound}, outside)
        assert allows({"type": "number", word: bound}, inside)


@pytest.mark.parametrize("schema", [
    {"const": BIG}, {"enum": [1, BIG]}, {"allOf": [{"enum": [1e22, 1]}, {"type": "integer"}]},
    {"properties": {"a": {"enum": [[{"b": BIG}]]}}}, {"const": -2.3738955829980686},
])  # fmt: skip
@pytest.mark.parametrize("place", ["json_schema", "structural_tag", "grammar"])
def test_values_of_many_digits_are_refused_by_name(schema: dict[str, Any], place: ConstraintKind) -> None:
    text = json.dumps(schema)
    if place == "structural_tag":
        text = json.dumps({"format": {"type": "json_schema", "json_schema": schema}})
    elif place == "grammar":
        text = f"start: %json {text}"
    with pytest.raises(InvalidRequest, match="(const|enum) has a number of more than 15 digits"):
        check_constraint(Constraint(kind=place, text=text), DEFAULT_LIMITS)


@pytest.mark.parametrize("word", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("bound", [2**63, 1e22, 2**64 - 1])
def test_ranges_that_begin_beyond_what_is_known_are_refused(word: str, bound: float) -> None:
    for kind in ("integer", "number"):
        text = json.dumps({"type": kind, word: bound, "maximum": 1e30})
        with pytest.raises(InvalidRequest, match=f"{word} is beyond the numbers"):
            check_constraint(Constraint(kind="json_schema", text=text, strict=False), DEFAULT_LIMITS)


def test_values_that_cannot_be_enforced_are_left_out_where_that_is_allowed(vocabulary: Vocabulary) -> None:
    constraint = Constraint(kind="json_schema", text=json.dumps({"type": "integer", "enum": [1, BIG]}), strict=False)
    check_constraint(constraint, DEFAULT_LIMITS)
    backend = LLGuidance(vocabulary)
    template = backend.compile(constraint)
    assert template.warnings == ("the schema is not enforced strictly: enum with a number of many digits is left out",)
    backend.close()
    schema = {"properties": {"enum": {"const": BIG}, "b": {"enum": ["x"], "const": 5}}}
    assert leave_out_inexact(schema) == ["const"]
    assert schema == {"properties": {"enum": {}, "b": {"enum": ["x"], "const": 5}}}


@pytest.mark.parametrize(("pattern", "right", "wrong"), [
    ("^[[:alpha:]]$", [":]", "[]", "a]"], ["a", "b", "b]"]),
    ("^[a&&b]$", ["a", "&", "b"], ["c"]),
    ("^[a~~b]$", ["a", "~"], ["-"]),
    (r"^[\[\]a]+$", ["[a]"], ["b"]),
    ("^[!--]+$", ["-!", "+"], ["."]),
    ("^[--/]+$", ["-.", "/"], [","]),
])  # fmt: skip
def test_classes_are_those_of_ecma(pattern: str, right: list[str], wrong: list[str]) -> None:
    for texts, expected in ((right, True), (wrong, False)):
        for text in texts:
            assert allows({"type": "string", "pattern": pattern}, json.dumps(text)) == expected, text


@pytest.mark.parametrize(
    "bounds", [(-3.4028234663852886e38, 3.4028234663852886e38), (0, 2**64 - 1), (-1.7e308, 1.7e308)]
)
def test_bounds_of_floats_are_within_what_the_library_knows(bounds: tuple[float, float]) -> None:
    schema = {"type": "number", "minimum": bounds[0], "maximum": bounds[1]}
    for text in ("0", "1.5", "123456789012", "8999999999999999999"):
        assert allows(dict(schema), text), text
    assert not allows(dict(schema), "1" + "0" * 19)


@pytest.mark.parametrize(("kind", "far"), [("integer", 2**63 - 1), ("number", 9 * 10**18)])
def test_ranges_without_an_end_may_begin_far_away(kind: str, far: int) -> None:
    for bound in (10**18 - 1, 10**18, 3 * 10**18):
        schema = {"type": kind, "minimum": bound}
        assert allows(dict(schema), str(bound + 2**20)) and allows(dict(schema), str(far))
        assert not allows(dict(schema), str(bound - 1)) and not allows(dict(schema), str(far + 1))
        schema = {"type": kind, "exclusiveMaximum": -bound}
        assert allows(dict(schema), str(-bound - 2**20)) and not allows(dict(schema), str(-bound))


@pytest.mark.parametrize("schema", [
    {"type": "integer", "minimum": 2**63}, {"type": "integer", "minimum": 2**63 - 2},
    {"type": "integer", "exclusiveMinimum": 1e30}, {"type": "number", "minimum": 1e22}, {"maximum": -1e300},
    {"allOf": [{"minimum": 2**63}, {"type": "integer"}]}, {"type": "integer", "minimum": 2**63, "maximum": 2**64 - 1},
])  # fmt: skip
def test_bounds_beyond_what_the_library_knows_are_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="(m|exclusiveM)(in|ax)imum is beyond the numbers"):
        exact_schema(schema)


def test_what_no_walk_finds_names_its_kind_too(vocabulary: Vocabulary) -> None:
    backend = LLGuidance(vocabulary)
    with pytest.raises(InvalidRequest, match="minimum is beyond") as refused:
        backend.compile(Constraint(kind="json_schema", text=json.dumps({"type": "integer", "minimum": 2**63 - 2})))
    assert refused.value.param == "json_schema"
    backend.close()


def test_tiny_bounds() -> None:
    assert not allows({"type": "number", "maximum": 5e-324, "minimum": -5e-324}, "1")
    assert allows({"type": "number", "maximum": 1, "exclusiveMinimum": 5e-324}, "0.5")
    assert not allows({"type": "number", "maximum": 1, "minimum": 5e-324}, "0")
    assert not allows({"type": "number", "maximum": -5e-324, "minimum": -1}, "0")


def test_what_is_left_out_as_null_is_left_out() -> None:
    assert allows({"type": "string", "format": "date", "allOf": None} | {"allOf": []}, '"2024-02-29"')
    for schema in (
        {"type": "string", "format": "date", "allOf": None},
        {"type": None, "minimum": 1},
        {"type": 5, "minimum": 1},
    ):
        exact_schema(schema)


def test_schemas_that_are_only_true_or_false(vocabulary: Vocabulary) -> None:
    backend = LLGuidance(vocabulary)
    everything = backend.compile(Constraint(kind="json_schema", text="true")).matcher()
    assert not everything.ended and everything.error() is None
    with pytest.raises(InvalidRequest):
        backend.compile(Constraint(kind="json_schema", text=" false"))
    backend.close()
