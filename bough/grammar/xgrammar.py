"""xgrammar as a backend: masks in a few microseconds, compiles in a child process that can be killed.

Its compiles take a hundred times longer than llguidance's and cannot be interrupted, it enforces fewer keywords and
lets others pass without a word, and its masks allow every tokenization, so that nothing but the end of an answer is
forced. So it gets what it is known to enforce exactly, and everything else goes to llguidance.

The child's program is :mod:`bough.grammar.xgrammar_child`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from bough.base.constraint import Constraint
from bough.base.errors import BoughError, ConfigError, InvalidRequest
from bough.base.plan import Ints
from bough.grammar.admission import parse
from bough.grammar.base import WORD, Matcher, Template, Vocabulary
from bough.grammar.llguidance import LLGuidance
from bough.grammar.structural import parse_tags
from bough.grammar.xgrammar_child import (
    COMPILE_SECONDS,
    SEPARATORS,
    Result,
    Start,
    read_message,
    tokenizer_info,
    write_message,
)

if TYPE_CHECKING:
    import xgrammar as library

if find_spec("xgrammar") is None:
    raise ConfigError("this grammar backend needs the package xgrammar: pip install 'bough[xgrammar]'")

COMMAND = (sys.executable, "-P", "-m", "bough.grammar.xgrammar_child")

ANNOTATIONS = frozenset(("$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated",
                         "readOnly", "writeOnly"))  # fmt: skip
KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": frozenset(("minimum", "maximum")),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""What of a schema of each type the library enforces as the standard says; found with the JSON-Schema-Test-Suite."""

_SAFE_PATTERN = re.compile(
    r"(?:[A-Za-z0-9 _\-,:;@#%&=<>!~'/]|\\[.\-+*?()\[\]{}|^$\\/]|\(\?:|\((?!\?)|\)|\||[*+?](?![+?])|"
    r"\{[0-9]+(?:,[0-9]*)?\}(?![+?])|\[(?:[A-Za-z0-9 _.,:;@#%&=<>!~'/+*?(){}|$]|(?<=[A-Za-z0-9])-(?=[A-Za-z0-9])|"
    r"\\[\-\]\\.])+\])*"
)
"""Regular expressions that mean the same everywhere: ASCII, classes without names or negation, groups, repeats."""


class XGMatcher:
    """A :class:`bough.grammar.base.Matcher` over a ``GrammarMatcher``."""

    free = False

    def __init__(self, native: library.GrammarMatcher, eos_ids: tuple[int, ...], words: int) -> None:
        self.native = native
        self._eos_ids = eos_ids
        self._words = words
        self._over = False
        self._ended: bool | None = None

    @property
    def ended(self) -> bool:
        if self._ended is None:
            self._ended = not self._over and self.native.is_completed() and self._only_the_end()
        return self._ended

    def _only_the_end(self) -> bool:
        bits = np.zeros((1, self._words), np.int32)
        self.native.fill_next_token_bitmask(bits)
        for token in self._eos_ids:
            bits.view("u4")[0, token // WORD] &= ~(1 << token % WORD) & 0xFFFFFFFF
        return not bits.any()

    def accept(self, token: int) -> bool:
        if self._over:
            return False
        if token in self._eos_ids:
            self._over = bool(self.native.is_completed())
            return self._over
        moved = bool(self.native.accept_token(token))
        if moved:
            self._ended = None
        return moved

    def forced(self, most: int) -> list[int]:
        return [self._eos_ids[0]] if most and not self._over and self.ended else []

    def error(self) -> str | None:
        return None


class XGTemplate:
    """A compiled constraint."""

    warnings: tuple[str, ...] = ()

    def __init__(self, compiled: library.CompiledGrammar, eos_ids: tuple[int, ...], words: int) -> None:
        self._compiled = compiled
        self._eos_ids = eos_ids
        self._words = words
        self.bytes: int = compiled.memory_size_bytes

    def matcher(self) -> XGMatcher:
        import xgrammar as library

        return XGMatcher(library.GrammarMatcher(self._compiled), self._eos_ids, self._words)


class XGrammar:
    """A :class:`bough.grammar.base.Backend`."""

    def __init__(self, vocabulary: Vocabulary, seconds: int = COMPILE_SECONDS) -> None:
        import xgrammar as library

        self._general = LLGuidance(vocabulary)
        self._start = _start_of(vocabulary, frozenset(self._general.atoms.values()), seconds)
        self._vocabulary = vocabulary
        self._words = -(-vocabulary.size // WORD)
        self._info = tokenizer_info(self._start)
        self._batch = library.BatchGrammarMatcher(max_threads=1)
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def compile(self, constraint: Constraint) -> Template:
        if not expressible(constraint, self._general.atoms):
            return self._general.compile(constraint)
        result = self._compiled(constraint)
        if result.failed:
            raise BoughError(f"{constraint.kind}: {result.failed}")
        if result.refused:
            raise InvalidRequest(f"{constraint.kind}: {result.refused}", param=constraint.kind)
        import xgrammar as library

        compiled = library.CompiledGrammar.deserialize_json(result.compiled, self._info)
        template = XGTemplate(compiled, self._vocabulary.eos_ids, self._words)
        bits = np.zeros((1, self._words), np.int32)
        self.fill([(template.matcher(), 0)], bits)
        if not bits.any():
            raise InvalidRequest(f"{constraint.kind}: nothing matches it", param=constraint.kind)
        return template

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bits: Ints) -> None:
        own = [(matcher.native, row) for matcher, row in matchers if isinstance(matcher, XGMatcher)]
        if own:
            rows = [row for _, row in own]
            self._batch.batch_fill_next_token_bitmask([native for native, _ in own], bits, rows)
            if self._vocabulary.size % WORD:  # it sets the bits that pad the last word
                bits[rows, -1] &= (1 << self._vocabulary.size % WORD) - 1
        if len(own) < len(matchers):
            self._general.fill([pair for pair in matchers if not isinstance(pair[0], XGMatcher)], bits)

    def close(self) -> None:
        self._closed = True
        if (child := self._child) is not None:
            child.kill()
        with self._lock:
            self._end()
        self._general.close()

    def _compiled(self, constraint: Constraint) -> Result:
        """The child's answer; one compile at a time, so that bombs cannot take every core."""
        with self._lock:
            try:
                child = self._running()
                assert child.stdin is not None and child.stdout is not None
                write_message(child.stdin, constraint)
                return msgspec.msgpack.decode(read_message(child.stdout), type=Result)
            except (OSError, EOFError):
                self._end()
                return Result(failed="the process that compiles has ended")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None and not self._closed:
            # A group of its own, so that an interrupt in a terminal does not end it before its parent is done.
            self._child = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
            )
            assert self._child.stdin is not None
            write_message(self._child.stdin, self._start)
        if self._child is None:
            raise EOFError
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            with self._child as child:
                child.kill()
            self._child = None


def _start_of(vocabulary: Vocabulary, apart: frozenset[int], seconds: int) -> Start:
    """``apart``: ids that are no text, so that no text is written with them."""
    known = range(min(vocabulary.n_tokens, vocabulary.size))
    tokens = [b"" if token in apart else vocabulary.token_bytes(token) for token in known]
    return Start(tokens, vocabulary.size, list(vocabulary.eos_ids), seconds)


def expressible(constraint: Constraint, apart: Mapping[str, int]) -> bool:
    """Whether xgrammar enforces ``constraint`` exactly; ``apart`` are the texts of tokens that are no text."""
    match constraint.kind:
        case "json_schema":
            return constraint.whitespace in SEPARATORS and _plain(parse(constraint))
        case "regex":
            return _SAFE_PATTERN.fullmatch(constraint.text) is not None
        case "choice":
            return True
        case "structural_tag":
            tags = parse_tags(constraint)
            texts = [*tags.triggers, *(text for s in tags.structures for text in (s.begin, s.end))]
            return (
                constraint.whitespace in SEPARATORS
                and tags.format is None
                and all(s.grammar is None and _plain(s.schema) for s in tags.structures)
                and not any(name in text for name in apart for text in texts if name)
            )
    return False


def _plain(schema: Any) -> bool:
    """Whether ``schema`` has only keywords that the library enforces, where it enforces them."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            return False
        words = node.keys() - ANNOTATIONS
        if words == {"const"} or words == {"enum"}:
            continue
        if words == {"anyOf"}:
            stack += node["anyOf"]
            continue
        kind = node.get("type")
        if not isinstance(kind, str) or not words - {"type"} <= KEYWORDS.get(kind, frozenset()):
            return False
        if "pattern" in words and not _plain_pattern(node, words):
            return False
        if kind == "object":
            properties = node.get("properties", {})
            if not isinstance(properties, dict) or node.get("additionalProperties") is not False:
                return False
            if not set(node.get("required", ())) <= properties.keys():
                return False
            stack += properties.values()
        if kind == "array":
            if "items" not in node:
                return False
            stack.append(node["items"])
    return True


def _plain_pattern(node: Mapping[str, Any], words: frozenset[str] | set[str]) -> bool:
    """Anchored on both sides, with nothing beside it."""
    pattern = node["pattern"]
    if not isinstance(pattern, str) or {"minLength", "maxLength"} & words:
        return False
    inner = pattern[1:-1]
    return pattern[:1] == "^" and pattern[-1:] == "$" and "|" not in inner and bool(_SAFE_PATTERN.fullmatch(inner))
