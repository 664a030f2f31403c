"""What every backend does: what each kind lets through, and that nothing it is given makes it fail quietly."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.grammar.base import BACKENDS, Backend, Matcher, Template, Vocabulary
from bough.sim.device import allowed_ids
from bough.text.tokenizer import Tokenizer

from .conftest import NEEDS_XGRAMMAR


@pytest.fixture(scope="module", params=["llguidance", pytest.param("xgrammar", marks=NEEDS_XGRAMMAR)])
def backend(request: pytest.FixtureRequest, vocabulary: Vocabulary) -> Iterator[Backend]:
    bound = {"seconds": 1} if request.param == "xgrammar" else {}
    made = BACKENDS.get(request.param)(vocabulary, **bound)
    yield made
    made.close()


@pytest.fixture
def size(vocabulary: Vocabulary) -> int:
    return vocabulary.size


def walk(backend: Backend, template: Template, ids: list[int], size: int) -> bool:
    """Whether the constraint allows ``ids`` and then the end; every id must be in its mask."""
    matcher = template.matcher()
    for token in [*ids, 0]:
        allowed = masks(backend, matcher, size)
        assert not matcher.ended or set(allowed) <= {0, 2}
        if token not in allowed or not matcher.accept(token):
            return False
    return not matcher.accept(0) and matcher.forced(9) == []


def masks(backend: Backend, matcher: Matcher, size: int) -> list[int]:
    bits = np.full((2, -(-size // 32)), -1, np.int32)
    backend.fill([(matcher, 1)], bits)
    assert (bits[0] == -1).all()
    return allowed_ids(bits[1:], size)[0]


TAG = {"structures": [{"begin": "<f=a>", "schema": {"enum": [1]}, "end": "</f>"},
                      {"begin": "<f=b>", "grammar": 'start: "x" y\ny: "z"+'},
                      {"begin": "<|im_start|>call ", "schema": {"type": "boolean"}, "end": "<|end|>"}],
       "triggers": ["<f=", "<|im_start|>"]}  # fmt: skip


INTEGERS = '{"type": "array", "items": {"type": "integer"}}'


def tag(**options: bool) -> Constraint:
    return Constraint(kind="structural_tag", text=json.dumps(TAG | options))


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (Constraint(kind="regex", text="[a-c]+é?"), ["a", "abccbé"], ["", "ad", "é"]),
        (
            Constraint(kind="choice", text='["a", "ab \\"c\\"", "\\n\\\\ é"]'),
            ["a", 'ab "c"', "\n\\ é"], ["", "ab", "b"],
        ),
        (Constraint(kind="grammar", text='root ::= "x" item*\nitem ::= [0-9] ","'), ["x", "x1,2,"], ["x1", ""]),
        (Constraint(kind="grammar", text='start: "(" start ")" | "a"'), ["a", "((a))"], ["(a", "a)"]),
        (Constraint(kind="json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":1}', "{} "]),
        (
            Constraint(kind="json_schema", text=INTEGERS),
            ["[]", "[1, 2]"], ["[1,2]", "[ 1]", '["a"]'],
        ),
        (
            Constraint(kind="json_schema", text=INTEGERS, whitespace="compact"),
            ["[1,2]"], ["[1, 2]"],
        ),
        (
            Constraint(kind="json_schema", text=INTEGERS, whitespace="free"),
            ["[1,2]", "[1,\n 2 ]"], ["[a]"],
        ),
        (
            Constraint(kind="json_schema", text=INTEGERS, whitespace=r"^\t?$"),
            ["[1,2]", "[1,\t2]"], ["[1, 2]"],
        ),
        (
            tag(), ["", "hello", "hello <f=a>1</f> and <f=b>xzz", "<f=a>1</f><f=a>1</f>"],
            ["<f=a>2</f>", "<f=c>", "hello <f=a>1"],
        ),
        (tag(at_least_one=True), ["<f=a>1</f>", "<f=b>xz there <f=a>1</f>"], ["", "hello", "hello <f=a>1</f>"]),
        (tag(stop_after_first=True), ["hi", "hi <f=a>1</f>"], ["<f=a>1</f> more", "<f=a>1</f><f=a>1</f>"]),
        (tag(at_least_one=True, stop_after_first=True), ["<f=a>1</f>", "<f=b>xz"], ["", "<f=a>1</f>more"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Constraint) else "",
)  # fmt: skip
def test_kinds(
    backend: Backend, tokenizer: Tokenizer, size: int, constraint: Constraint, right: list[str], wrong: list[str]
) -> None:
    template = backend.compile(constraint)
    assert not template.warnings
    for text in right:
        assert walk(backend, template, tokenizer.encode_plain(text), size), text
    for text in wrong:
        assert not walk(backend, template, tokenizer.encode_plain(text), size), text


def test_a_wrong_token_leaves_the_matcher_where_it_was(backend: Backend, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(Constraint(kind="regex", text="ab+")).matcher()
    [a], [b] = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    assert not matcher.accept(b) and not matcher.accept(0)
    assert matcher.error() is None and matcher.accept(a) and matcher.accept(b) and matcher.accept(0)


def test_matchers_are_filled_together(backend: Backend, size: int) -> None:
    """Whatever made their templates."""
    texts = ["[ab]+", "\\p{L}+", "x(y|z){2}", "(?i)q"]
    matchers = [backend.compile(Constraint(kind="regex", text=text)).matcher() for text in texts]
    bits = np.zeros((7, -(-size // 32)), np.int32)
    backend.fill([(matcher, 6 - i) for i, matcher in enumerate(matchers)], bits)
    together = allowed_ids(bits, size)
    assert [together[6 - i] for i in range(4)] == [masks(backend, matcher, size) for matcher in matchers]
    assert all(together[6 - i] for i in range(4)) and not any(together[:3])


PROPERTIES = {f"p{i}": {"type": "string"} for i in range(1000)}
BOMBS = {
    "optional properties": json.dumps({"type": "object", "properties": PROPERTIES, "additionalProperties": False}),
    "enum": json.dumps({"enum": [f"value {i}" for i in range(20_000)]}),
    "any_of 4^5": json.dumps({"anyOf": [{"type": "object", "properties": {
        "a": {"anyOf": [{"type": "object", "properties": {f"q{i}{j}": {"anyOf": [{"const": f"{i}{j}{k}"} for k in
        range(16)]}}} for j in range(16)]}}} for i in range(4)]}),
    "repetition": '{"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}',
    "long string": '{"type": "string", "maxLength": 100000, "minLength": 50000}',
    "many items": '{"type": "array", "minItems": 100000, "items": {"type": "object"}}',
    "recursion": '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}',
    "cycle": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
    "all_of cycle": '{"allOf": [{"$ref": "#"}]}',
    "catastrophic": '{"type": "string", "pattern": "^(.*a){25}.*$"}',
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_or_work(backend: Backend, size: int, bomb: str) -> None:
    """Each is a 400 at the compile, or an error that is told, or masks until the end of the test."""
    try:
        matcher = backend.compile(Constraint(kind="json_schema", text=BOMBS[bomb])).matcher()
    except InvalidRequest:
        return
    rng = np.random.default_rng(0)
    for _ in range(40):
        allowed = masks(backend, matcher, size)
        if matcher.error() is not None or matcher.ended:
            return
        assert matcher.accept(int(rng.choice(allowed)))
