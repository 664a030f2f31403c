"""The default backend: llguidance (Earley parser over derivatives of regular expressions, in Rust).

Compiles in about a millisecond, bounded by fuel; refuses what it cannot enforce; its masks leave only canonical
tokenizations, so that what it forces can be appended without sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import llguidance.numpy
import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.formats import with_exact_schema
from bough.base.numbers import leave_out_inexact
from bough.base.plan import Ints
from bough.grammar.admission import parse
from bough.grammar.base import WORD, Matcher, Vocabulary
from bough.grammar.composed import grammar_of_tags
from bough.grammar.threads import in_pauses, native_threads
from bough.grammar.whitespace import written_whitespace

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SPACING: dict[str, JsonCompileOptions] = {
    "fixed": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "compact": {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
    "free": {"whitespace_flexible": True},
}

_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_CHARACTER}{{1,{n}}}" for n in (2, 4, 6, 8, 10, 14, 18, 24, 30)),
    f"{_CHARACTER}+",
)
"""Sets of tokens that are let through as a whole where all of them fit. The library's own stop at 10 and 30 characters,
between which strings with a maxLength lie for most of their tokens: their masks take a fifth of the time with these."""

BASE_BYTES, BYTES_PER_BYTE = 64 << 10, 16
"""Estimated memory of a template: a constant, and so much for each byte of its grammar."""

NUMERIC = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords whose numbers make the library panic."""
MESSAGE_CHARS = 500

_PLACE, _SOURCE = re.compile(r"at (\d+)\(\d+\)"), re.compile(r"\n\s*\d+ \| ")

NATIVE_THREADS = 2


class LLMatcherState:
    """A :class:`bough.grammar.base.Matcher` over an ``LLMatcher``.

    An ``LLMatcher`` never raises: it falls into a state of error in which only the end of the sequence is allowed.
    """

    free = False

    def __init__(self, native: LLMatcher, eos_ids: tuple[int, ...], canonical: bool, run: list[int]) -> None:
        self.native = native
        self._eos_ids = eos_ids
        self._canonical = canonical
        self._run = run
        """What was found to be forced, in reverse. The library finds a whole run each time that it is asked."""
        self._over = False

    @property
    def ended(self) -> bool:
        stopped: bool = self.native.is_stopped()
        return stopped and not self.native.is_error()

    def accept(self, token: int) -> bool:
        if self._over or self.native.is_error():
            return False
        if token in self._eos_ids:
            # It ends the answer also where a grammar names it as one of its own tokens.
            self._over = self.native.is_accepting() or self.native.deep_copy().consume_token(token)
            return self._over
        if self._run and self._run.pop() != token:
            self._run.clear()
        return self.native.try_consume_tokens([token]) == 1

    def forced(self, most: int) -> list[int]:
        if self._over or most < 1 or not self._canonical:
            return []
        if self.ended:
            return [self._eos_ids[0]]
        if not self._run:
            self._run = self.native.compute_ff_tokens()[::-1]
        return self._run[: -most - 1 : -1]

    def error(self) -> str | None:
        return _shown(self.native.get_error()) if self.native.is_error() else None


@dataclass(frozen=True, slots=True)
class LLTemplate:
    """A compiled constraint; ``native`` is never moved."""

    native: LLMatcher
    warnings: tuple[str, ...]
    bytes: int
    eos_ids: tuple[int, ...]
    canonical: bool
    run: tuple[int, ...]
    """What is forced at the beginning, in reverse."""

    def matcher(self) -> LLMatcherState:
        return LLMatcherState(self.native.deep_copy(), self.eos_ids, self.canonical, list(self.run))


class LLGuidance:
    """A :class:`bough.grammar.base.Backend`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ValueError for a tokenizer that the library cannot read."""
        self._vocabulary = vocabulary
        self._tags = LLTokenizer(vocabulary.json, vocabulary.size, list(vocabulary.eos_ids))
        # With the default bound on items a schema of more than some 500 optional properties compiles, and fails at its
        # first string. The other bounds keep a compile at about a second, most masks at some 20 ms and what is forced
        # at one time below 100 ms.
        self._limits = LLParserLimits(
            initial_lexer_fuel=1_000_000,
            max_grammar_size=200_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_items_in_row=20_000,
            max_lexer_states=50_000,
            verbose_errors=False,
        )
        # The library keeps some tokens that are not special, such as Qwen's <tool_call>, out of texts all the same, but
        # spells texts with them: what it forces then is not in its own language. In tags they mean themselves, as
        # special tokens do; elsewhere such a text is spelled out.
        added = json.loads(vocabulary.json)["added_tokens"]
        text = self._bits(LLMatcher(self._tags, LLMatcher.grammar_from_lark("start: /(.|\\n)*/"), log_level=0))
        apart = {
            token["content"]: token["id"]
            for token in added
            if not token["special"] and not text[token["id"] // WORD] >> token["id"] % WORD & 1
        }
        self.atoms = {**vocabulary.special, **apart}
        """Texts and ids of the tokens that are no text."""
        self._text = self._without(apart) if apart else self._tags
        self._json = self._text.with_slices(list(SLICES))
        self._native = native_threads(NATIVE_THREADS)

    def compile(self, constraint: Constraint) -> LLTemplate:
        attempts: list[JsonCompileOptions] = [{}]
        left_out: list[str] = []
        if constraint.kind == "json_schema" and not constraint.strict:
            constraint, left_out = _without_inexact(constraint)
            attempts += [{"coerce_one_of": True}, {"coerce_one_of": True, "lenient": True}]
        tokenizer = self._text
        if constraint.kind in ("json_schema", "json_object"):
            tokenizer = self._json
        elif constraint.kind == "structural_tag":
            tokenizer = self._tags
        for options in attempts:
            grammar = self._grammar(constraint, options)
            native, first, possible = self._native.submit(self._built, tokenizer, grammar).result()
            if not native.is_error():
                break
        else:
            raise InvalidRequest(_refusal(constraint, native.get_error()), param=constraint.kind)
        warnings = list(native.get_grammar_warnings())
        if options and '"oneOf"' in constraint.text:
            warnings.insert(0, "the schema is not enforced strictly: oneOf is treated as anyOf")
        if left_out:
            words = " and ".join(left_out)
            warnings.insert(0, f"the schema is not enforced strictly: {words} with a number of many digits is left out")
        if first.is_error():
            raise InvalidRequest(_refusal(constraint, first.get_error()), param=constraint.kind)
        if not possible:
            raise InvalidRequest(f"{constraint.kind}: nothing matches it", param=constraint.kind)
        run = tuple(first.compute_ff_tokens()[::-1])
        size = BASE_BYTES + BYTES_PER_BYTE * len(grammar)
        eos_ids, canonical = self._vocabulary.eos_ids, bool(tokenizer.is_canonical)
        return LLTemplate(native, tuple(warnings), size, eos_ids, canonical, run)

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        # The library's batched call hands the work to a thread of its own, and to wake that takes longer than a mask.
        assert bits.flags.c_contiguous and bits.dtype == np.int32
        address, size = bits.ctypes.data, bits.strides[0]
        for matcher, row in matchers:
            if isinstance(matcher, LLMatcherState):
                matcher.native.unsafe_compute_mask_ptr(address + row * size, size)

    def close(self) -> None:
        """End the threads; there is nothing outside this process."""
        self._native.shutdown()

    def _grammar(self, constraint: Constraint, extra: JsonCompileOptions) -> str:
        text = constraint.text
        options: JsonCompileOptions = {**_spacing(constraint.whitespace), **extra}
        try:
            match constraint.kind:
                case "json_object":
                    text = '{"type": "object"}'
                case "regex":
                    return str(LLMatcher.grammar_from_regex(text))
                case "grammar":
                    return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
                case "choice":
                    return str(LLMatcher.grammar_from_lark(_lark_of_choice(parse(constraint))))
                case "structural_tag":
                    return grammar_of_tags(constraint, self.atoms, dict(options))
            text = {"true": "{}", "false": '{"not": {}}'}.get(text.strip(), text)  # no place for options in these
            return str(LLMatcher.grammar_from_json_schema(with_exact_schema(text, in_pauses), overrides=options))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=error.param or constraint.kind) from None
        except Exception as error:  # the converters raise whatever their own bugs make them raise
            raise InvalidRequest(_refusal(constraint, str(error)), param=constraint.kind) from None

    def _built(self, tokenizer: LLTokenizer, grammar: str) -> tuple[LLMatcher, LLMatcher, bool]:
        """(matcher, copy that has made the first mask, whether that mask allows anything).

        The first mask is the most expensive one, and here nobody waits for it.
        """
        native = LLMatcher(tokenizer, grammar, log_level=0, limits=self._limits)
        first = native.deep_copy()
        return native, first, bool(self._bits(first).any())

    def _bits(self, native: LLMatcher) -> Ints:
        """[ceil(V / 32)] the mask of ``native`` where it stands."""
        bits = np.zeros(-(-self._vocabulary.size // WORD), np.int32)
        llguidance.numpy.fill_next_token_bitmask(native, bits[None])
        return bits

    def _without(self, tokens: Collection[str]) -> LLTokenizer:
        """The tokenizer, which does not look for ``tokens`` in texts."""
        described = json.loads(self._vocabulary.json)
        described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] not in tokens]
        return LLTokenizer(json.dumps(described), self._vocabulary.size, list(self._vocabulary.eos_ids))


def _without_inexact(constraint: Constraint) -> tuple[Constraint, list[str]]:
    """A JSON Schema without values that cannot be enforced, and the keywords that are left out."""
    schema = parse(constraint)
    left_out = leave_out_inexact(schema)
    return msgspec.structs.replace(constraint, text=json.dumps(schema)) if left_out else constraint, left_out


def _spacing(whitespace: str) -> JsonCompileOptions:
    if whitespace in SPACING:
        return SPACING[whitespace]
    pattern = written_whitespace(whitespace)
    return {"whitespace_flexible": True, "whitespace_pattern": pattern} if pattern else SPACING["compact"]


def _lark_of_choice(choices: list[str]) -> str:
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _refusal(constraint: Constraint, message: str) -> str:
    """What the library says against a constraint; in place of a panic, what is likely to have caused it."""
    if not message.startswith("panic:"):
        return f"{constraint.kind}: {_shown(message)}"
    named = [keyword for keyword in NUMERIC if f'"{keyword}"' in constraint.text]
    cause = f", probably of {', '.join(named)} with numbers of many digits" if named else ""
    return f"{constraint.kind}: the grammar library fails because of it{cause}"


def _shown(message: str) -> str:
    """An error of the library within bounds: the rule that is to blame in place of the source around it."""
    text = _SOURCE.split(message)[0]
    if place := _PLACE.match(text):
        rule = re.search(rf"^\s*{place[1]} \| (\w+)", message, re.MULTILINE)
        text = f"{place[0]}, rule {rule[1]}{text[place.end() :]}" if rule else text
    text = " ".join(text.replace("<non-verbose/>", "").split())
    return text if len(text) <= MESSAGE_CHARS else text[:MESSAGE_CHARS] + "..."
