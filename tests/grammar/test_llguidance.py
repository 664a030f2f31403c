"""The default backend: special tokens, forced ids, and that it reads the vocabulary as we do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.formats import exact_schema
from bough.grammar.base import Vocabulary
from bough.grammar.llguidance import LLGuidance
from bough.text.tokenizer import Tokenizer

from .test_backends import masks, tag, walk


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> Iterator[LLGuidance]:
    made = LLGuidance(vocabulary)
    yield made
    made.close()


@pytest.fixture
def size(vocabulary: Vocabulary) -> int:
    return vocabulary.size


def test_special_tokens_in_tags_mean_themselves(backend: LLGuidance, tokenizer: Tokenizer, size: int) -> None:
    template = backend.compile(tag())
    start = tokenizer.special_ids & {tokenizer.encode("<|im_start|>", add_special=False)[0]}
    body = tokenizer.encode_plain("call true")
    end = tokenizer.encode("<|end|>", add_special=False)
    assert end == [0] and len(start) == 1
    matcher = template.matcher()
    for token in [*tokenizer.encode_plain("so: "), *start, *body]:
        assert token in masks(backend, matcher, size) and matcher.accept(token)
    # The end tag is an end of the sequence here, and the only thing that may follow.
    assert masks(backend, matcher, size) == end == matcher.forced(9) and matcher.accept(0)
    assert not walk(backend, template, [*start, *tokenizer.encode_plain("call 3")], size)


def test_added_tokens_that_are_not_special_do_too(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    described, call = json.loads(vocabulary.json), tokenizer.vocab_size
    described["added_tokens"].append({
        "id": call, "content": "<tool_call>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": False,
    })  # fmt: skip
    backend = LLGuidance(replace(vocabulary, json=json.dumps(described)))
    structures = [{"begin": "<tool_call>", "schema": {"enum": ["x"]}, "end": "</f>"}]
    tags = {"structures": structures, "triggers": ["<tool_call>"], "at_least_one": True, "stop_after_first": True}
    try:
        tagged = Constraint(kind="structural_tag", text=json.dumps(tags))
        chosen = Constraint(kind="choice", text=json.dumps(["<tool_call>", "<tool_call>s"]))
        for constraint, first in ((tagged, [call]), (chosen, tokenizer.encode_plain("<tool_call>")[:1])):
            matcher = backend.compile(constraint).matcher()
            assert masks(backend, matcher, vocabulary.size) == first == matcher.forced(1)
            while not matcher.ended:
                allowed = masks(backend, matcher, vocabulary.size)
                assert matcher.accept(max(allowed)) and matcher.error() is None
    finally:
        backend.close()


def test_forced_ids_are_the_only_ones_allowed(backend: LLGuidance, size: int) -> None:
    schema = {"type": "object", "properties": {"the_cat": {"enum": ["sat on the mat", "sat on the log"]}},
              "required": ["the_cat"], "additionalProperties": False}  # fmt: skip
    matcher = backend.compile(Constraint(kind="json_schema", text=json.dumps(schema))).matcher()
    said: list[int] = []
    jumps = 0
    while 0 not in said:
        forced, allowed = matcher.forced(64), masks(backend, matcher, size)
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


@pytest.mark.parametrize("most", [None, 1, 5, 12, 24, 31])
def test_slices_change_no_mask(backend: LLGuidance, vocabulary: Vocabulary, size: int, most: int | None) -> None:
    text = {"type": "string"} | ({} if most is None else {"maxLength": most})
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": text}, "required": ["a"]}, "minItems": 9}
    constraint = Constraint(kind="json_schema", text=json.dumps(schema), whitespace="free")
    unsliced = LLGuidance(vocabulary)
    unsliced._json = unsliced._text
    pair = [each.compile(constraint).matcher() for each in (backend, unsliced)]
    rng = np.random.default_rng(most)
    for _ in range(80):
        allowed, twin = (masks(each, matcher, size) for each, matcher in zip((backend, unsliced), pair))
        assert allowed == twin
        token = int(rng.choice(allowed))
        assert all(matcher.accept(token) for matcher in pair)
    unsliced.close()


def test_a_refused_schema_in_a_grammar_names_the_rule(backend: LLGuidance) -> None:
    good, bad = ('%json {"type": "string"}', '%json {"type": "array", "contains": {}}')
    grammar = Constraint(
        kind="grammar", text=f"%llguidance {{}}\nstart: call_0 | call_1\ncall_0: {good}\ncall_1: {bad}"
    )
    structures = [{"begin": "<f>", "schema": {"type": "string"}}, {"begin": "<g>", "schema": {"contains": {}}}]
    tags = Constraint(kind="structural_tag", text=json.dumps({"structures": structures, "triggers": ["<"]}))
    for constraint, rule in ((grammar, "call_1"), (tags, "part_1")):
        with pytest.raises(InvalidRequest) as caught:
            backend.compile(constraint)
        message = caught.value.message
        assert f'rule {rule}: failed to compile JSON schema: Unimplemented keys: ["contains"]' in message
        assert len(message) < 120 and caught.value.param == constraint.kind


def test_integers_of_64_bits_have_bounds_that_the_library_can_count(backend: LLGuidance) -> None:
    int64 = {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1}
    for schema in (int64, {"type": "integer", "exclusiveMinimum": -1e30}, {"properties": {"minimum": int64}}):
        backend.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
    number = {"type": ["integer", "number"], "minimum": -1e300}
    assert exact_schema(dict(number)) == number | {"minimum": -9 * 10**18}
    backend.compile(Constraint(kind="json_schema", text=json.dumps(number)))


def test_numbers_that_make_the_library_panic_are_named(backend: LLGuidance) -> None:
    text = json.dumps({"enum": [-1e18, 100, -999999999999999999]})
    with pytest.raises(InvalidRequest, match="probably of enum with") as caught:
        backend.compile(Constraint(kind="json_schema", text=text))
    assert "backtrace" not in str(caught.value)
