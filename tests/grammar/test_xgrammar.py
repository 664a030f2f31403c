"""What is xgrammar's and what is not, and the child that compiles: bounded, killable, gone at the end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bough.base.constraint import Constraint
from bough.base.errors import BoughError, InvalidRequest
from bough.grammar.base import Vocabulary
from bough.grammar.llguidance import LLTemplate
from bough.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar", reason="needs pip install 'bough[xgrammar]'")

from bough.grammar.xgrammar import XGrammar, XGTemplate

from .test_backends import masks

SLOW = Constraint(kind="json_schema", text=json.dumps({"enum": [f"value {i}" for i in range(20_000)]}))
QUICK = Constraint(kind="regex", text="[ab]+")


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> Iterator[XGrammar]:
    made = XGrammar(vocabulary, seconds=1)
    yield made
    made.close()


def child(backend: XGrammar) -> int:
    """Process id of the one that compiles."""
    assert backend._child is not None
    return backend._child.pid


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize(
    ("schema", "own"),
    [
        ('{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}', 1),
        ('{"type": "integer", "minimum": 3}', 1),
        ('{"anyOf": [{"const": [1, {"a": null}]}, {"enum": ["x"]}], "title": "t"}', 1),
        ('{"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2}-[0-9]+$"}, "minItems": 1}', 1),
        ('{"type": "object"}', 0),
        ('{"type": "object", "properties": {"a": {"type": "null"}}}', 0),
        ('{"type": "string", "pattern": "a|b"}', 0),
        ('{"type": "string", "pattern": "^.*$"}', 0),
        ('{"type": "string", "format": "date"}', 0),
        ('{"type": "integer", "multipleOf": 3}', 0),
        ('{"type": ["integer", "null"]}', 0),
        ('{"type": "array", "items": {"type": "null"}, "prefixItems": []}', 0),
        ('{"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}}', 0),
    ],
)  # fmt: skip
def test_it_gets_what_it_enforces(backend: XGrammar, schema: str, own: int) -> None:
    template = backend.compile(Constraint(kind="json_schema", text=schema))
    assert isinstance(template, XGTemplate if own else LLTemplate)


def test_what_it_ignores_is_still_refused(backend: XGrammar) -> None:
    for schema in ('{"type": "array", "uniqueItems": true}', '{"not": {"type": "null"}}', '{"type": "nonsense"}'):
        with pytest.raises(InvalidRequest):
            backend.compile(Constraint(kind="json_schema", text=schema))


def test_tokens_that_are_no_text_are_in_none(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    described, call = json.loads(vocabulary.json), tokenizer.vocab_size
    described["added_tokens"].append({
        "id": call, "content": "<tool_call>", "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": False,
    })  # fmt: skip
    known = replace(
        vocabulary, json=json.dumps(described), n_tokens=call + 1,
        token_bytes=lambda token: b"<tool_call>" if token == call else tokenizer.token_bytes(token),
    )  # fmt: skip
    backend, size = XGrammar(known), vocabulary.size
    try:
        apart = {call, *tokenizer.special_ids}
        for text in ("<tool_call>", *vocabulary.special):
            one = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1}
            for schema, written in (({"const": text}, json.dumps(text)), (one, json.dumps([f"a{text}b"]))):
                template = backend.compile(Constraint(kind="json_schema", text=json.dumps(schema)))
                assert isinstance(template, XGTemplate)
                matcher = template.matcher()
                for token in tokenizer.encode_plain(written):
                    allowed = masks(backend, matcher, size)
                    assert token in allowed and not apart & set(allowed) and matcher.accept(token)
        tags = {"structures": [{"begin": "<tool_call>", "schema": {"enum": ["x"]}, "end": "</f>"}],
                "triggers": ["<tool_call>"]}  # fmt: skip
        template = backend.compile(Constraint(kind="structural_tag", text=json.dumps(tags)))
        assert isinstance(template, LLTemplate) and call in masks(backend, template.matcher(), size)
    finally:
        backend.close()


def test_a_compile_that_takes_too_long_ends_alone(backend: XGrammar) -> None:
    assert isinstance(backend.compile(QUICK), XGTemplate)
    before = child(backend)
    with pytest.raises(InvalidRequest, match="too much time"):
        backend.compile(SLOW)
    assert isinstance(backend.compile(QUICK), XGTemplate)
    assert child(backend) == before and children(before) == []


def test_a_child_that_dies_is_replaced(backend: XGrammar) -> None:
    backend.compile(QUICK)
    before = child(backend)
    os.kill(before, signal.SIGKILL)
    with pytest.raises(BoughError, match="has ended"):
        backend.compile(QUICK)
    assert isinstance(backend.compile(QUICK), XGTemplate)
    assert child(backend) != before


def test_nothing_is_left_of_a_closed_one(vocabulary: Vocabulary) -> None:
    made = XGrammar(vocabulary)
    made.compile(QUICK)
    pid = child(made)
    made.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(BoughError, match="has ended"):
        made.compile(QUICK)
