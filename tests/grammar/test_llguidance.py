"""The default backend: what each kind lets through, and that nothing it is given makes it fail quietly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.grammar.base import Vocabulary
from bough.grammar.llguidance import LLGuidance, LLMatcherState, LLTemplate
from bough.sim.device import allowed_ids
from bough.text.tokenizer import Tokenizer

PADDING = 75
"""Ids with a logit that the tokenizer does not know, as models with padded vocabularies have them."""


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


@pytest.fixture(scope="module")
def backend(tokenizer: Tokenizer) -> LLGuidance:
    special = {tokenizer.token_text(token): token for token in tokenizer.special_ids}
    size = tokenizer.vocab_size + PADDING
    return LLGuidance(Vocabulary(tokenizer.to_json(), size, (0, 2), special))


def walk(backend: LLGuidance, template: LLTemplate, ids: list[int]) -> bool:
    """Whether the constraint allows ``ids`` and then the end; every id must be in its mask."""
    matcher = template.matcher()
    for token in [*ids, 0]:
        if token not in masks(backend, matcher) or not matcher.accept(token):
            return False
    return True


def masks(backend: LLGuidance, matcher: LLMatcherState) -> list[int]:
    size = backend._vocabulary.size
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
            Constraint(kind="json_schema", text=INTEGERS, whitespace="[_]?"),
            ["[1,2]", "[1,_2]"], ["[1, 2]"],
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
    backend: LLGuidance, tokenizer: Tokenizer, constraint: Constraint, right: list[str], wrong: list[str]
) -> None:
    template = backend.compile(constraint)
    assert not template.warnings and template.canonical
    for text in right:
        assert walk(backend, template, tokenizer.encode_plain(text)), text
    for text in wrong:
        assert not walk(backend, template, tokenizer.encode_plain(text)), text


def test_special_tokens_in_tags_mean_themselves(backend: LLGuidance, tokenizer: Tokenizer) -> None:
    template = backend.compile(tag())
    start = tokenizer.special_ids & {tokenizer.encode("<|im_start|>", add_special=False)[0]}
    body = tokenizer.encode_plain("call true")
    end = tokenizer.encode("<|end|>", add_special=False)
    assert end == [0] and len(start) == 1
    matcher = template.matcher()
    for token in [*tokenizer.encode_plain("so: "), *start, *body]:
        assert token in masks(backend, matcher) and matcher.accept(token)
    # The end tag is an end of the sequence here, and the only thing that may follow.
    assert masks(backend, matcher) == end == matcher.forced(9) and matcher.accept(0)
    assert not walk(backend, template, [*start, *tokenizer.encode_plain("call 3")])


def test_forced_ids_are_the_only_ones_allowed(backend: LLGuidance) -> None:
    schema = {"type": "object", "properties": {"the_cat": {"enum": ["sat on the mat", "sat on the log"]}},
              "required": ["the_cat"], "additionalProperties": False}  # fmt: skip
    matcher = backend.compile(Constraint(kind="json_schema", text=json.dumps(schema))).matcher()
    said: list[int] = []
    jumps = 0
    while 0 not in said:
        forced, allowed = matcher.forced(64), masks(backend, matcher)
        assert matcher.forced(2) == forced[:2]
        jumps += len(forced) > 1
        if matcher.ended:
            assert forced == [0]
        elif forced:
            assert allowed == forced[:1]
        else:
            assert len(allowed) > 1
        said.append(forced[0] if forced else min(allowed))
        assert matcher.accept(said[-1])
    assert jumps > 3 and not matcher.accept(0) and matcher.forced(5) == []


def test_the_library_reads_every_token_as_we_do(backend: LLGuidance, tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.vocab_size):
        data = tokenizer.token_bytes(token)
        # The byte 0xFF is in no text; the library uses it for its own ends.
        if token not in tokenizer.special_ids and b"\xff" not in data:
            assert backend._text.decode_bytes([token]) == data


def test_a_wrong_token_leaves_the_matcher_where_it_was(backend: LLGuidance, tokenizer: Tokenizer) -> None:
    matcher = backend.compile(Constraint(kind="regex", text="ab+")).matcher()
    [a], [b] = tokenizer.encode_plain("a"), tokenizer.encode_plain("b")
    assert not matcher.accept(b) and not matcher.accept(0)
    assert matcher.error() is None and matcher.accept(a) and matcher.accept(b) and matcher.accept(0)


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
def test_bombs_are_refused_or_work(backend: LLGuidance, bomb: str) -> None:
    """Each is a 400 at the compile, or an error that is told, or masks until the end of the test."""
    try:
        matcher = backend.compile(Constraint(kind="json_schema", text=BOMBS[bomb])).matcher()
    except InvalidRequest:
        return
    rng = np.random.default_rng(0)
    for _ in range(40):
        allowed = masks(backend, matcher)
        if matcher.error() is not None or matcher.ended:
            return
        assert matcher.accept(int(rng.choice(allowed)))
