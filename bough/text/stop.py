"""Stop strings and stop patterns, on both sides.

The engine decides: a :class:`StopMatcher` looks at the text after each token, and a request ends at the
first token that completes a match. The API side shows: a :class:`StopTrimmer` streams text without ever
showing the beginning of a stop string that may still complete.

What counts as a match:

- A stop string matches wherever it occurs in the generated text, across and inside tokens.
- A pattern (RE2 syntax, linear time) is searched, after each token, in the text generated so far, of which
  the last ``WINDOW`` characters are looked at: a match longer than that is not found, everything else is
  found as in the whole text. ``^`` and ``\\A`` mean the beginning of the generated text, ``$`` and ``\\z`` its end
  so far; ``\\b``, ``\\w``, ``\\d`` and ``\\s`` know only ASCII.
- Only matches that end in the newest token's text count, and only from token number ``min_tokens`` on.
- Among several, the one that begins first in the text wins, then the one that was given first, strings
  before patterns.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from bough.base.errors import InvalidRequest
from bough.text.detokenizer import IncrementalDetokenizer

WINDOW = 4096
_PATTERN_MEMORY = 1 << 20


@dataclass(frozen=True, slots=True)
class Match:
    """Why a sequence stops: ``pattern`` is the stop string or stop_regex as the client gave it.

    ``start`` and ``end`` are offsets in characters from the beginning of the generated text.
    """

    kind: Literal["string", "regex"]
    pattern: str
    start: int
    end: int


class _Found(Protocol):
    def start(self) -> int: ...

    def end(self) -> int: ...


class Pattern(Protocol):
    """A compiled pattern."""

    def finditer(self, text: str, pos: int | None = None) -> Iterator[_Found]: ...


class _Options(Protocol):
    max_mem: int
    log_errors: bool
    never_capture: bool


class _RE2(Protocol):
    error: type[Exception]

    def Options(self) -> _Options: ...

    def compile(self, pattern: str, options: _Options) -> Pattern: ...


def compile_patterns(patterns: Iterable[str]) -> tuple[Pattern, ...]:
    """Compile stop patterns; raises InvalidRequest for one that RE2 rejects or that matches the empty text."""
    if not (patterns := tuple(patterns)):
        return ()
    re2 = cast(_RE2, importlib.import_module("re2"))
    options = re2.Options()
    options.max_mem = _PATTERN_MEMORY
    options.log_errors = False
    options.never_capture = True
    compiled = []
    for pattern in patterns:
        try:
            program = re2.compile(pattern, options)
        except (re2.error, UnicodeEncodeError) as error:
            raise InvalidRequest(f"stop_regex {pattern!r} is not valid: {_reason(error)}", param="stop_regex") from None
        if next(program.finditer(""), None) is not None:
            raise InvalidRequest(f"stop_regex {pattern!r} matches the empty text", param="stop_regex")
        compiled.append(program)
    return tuple(compiled)


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)


class StopMatcher:
    """The engine's side: one per sequence that has stop strings or patterns.

    Args:
        stop: strings, each non-empty.
        stop_regex: patterns; InvalidRequest when one does not compile.
        min_tokens: matches count only from this token on.
        detokenizer: gives the text of each token; not used by anyone else.
    """

    def __init__(
        self, stop: Sequence[str], stop_regex: Sequence[str], min_tokens: int, detokenizer: IncrementalDetokenizer
    ) -> None:
        self._strings = tuple(stop)
        self._patterns = tuple(zip(stop_regex, compile_patterns(stop_regex), strict=True))
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        # One character more than is searched, so that \b and (?m)^ see what comes before the window.
        self._keep = WINDOW + 1 if stop_regex else max((len(s) for s in stop), default=1) - 1
        self._tail = ""
        self._dropped = 0
        self._tokens = 0

    def push(self, token_id: int) -> Match | None:
        """Take the next token; returns the match that it completes, if any."""
        self._tokens += 1
        piece = self._detokenizer.push((token_id,))
        if not piece:
            return None
        old = len(self._tail)
        window = self._tail + piece
        match = None if self._tokens < self._min_tokens else self._search(window, old)
        cut = max(0, len(window) - self._keep)
        self._tail = window[cut:]
        self._dropped += cut
        return match

    def _search(self, window: str, old: int) -> Match | None:
        """The best match in ``window`` that ends behind its first ``old`` characters."""
        best: Match | None = None
        for string in self._strings:
            start = window.find(string, max(0, old - len(string) + 1))
            if start >= 0 and (best is None or self._dropped + start < best.start):
                best = Match("string", string, self._dropped + start, self._dropped + start + len(string))
        begin = max(0, old - WINDOW)
        for source, pattern in self._patterns:
            for found in pattern.finditer(window, begin):
                if found.end() > old:
                    start = self._dropped + found.start()
                    if best is None or start < best.start:
                        best = Match("regex", source, start, self._dropped + found.end())
                    break
        return best


class StopTrimmer:
    """The API side: passes text on, keeps back what may turn out to be the beginning of a stop string.

    Text that a pattern matched is part of the answer: it cannot be known in time to keep it back.

    Args:
        stop: strings, each non-empty.
        include: the stop string is shown at the end of the answer.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._longest = max((len(s) for s in stop), default=1) - 1
        self._firsts = frozenset(s[0] for s in stop)
        self._held = ""

    def push(self, text: str) -> str:
        """Take text of tokens that did not end the sequence; returns what can be shown now."""
        if not self._stop:
            return text
        text = self._held + text
        cut = max(0, len(text) - self._longest)
        while cut < len(text) and not self._may_begin(text, cut):
            cut += 1
        self._held = text[cut:]
        return text[:cut]

    def _may_begin(self, text: str, at: int) -> bool:
        """Whether ``text`` from ``at`` on is the beginning of a stop string that is not complete."""
        if text[at] not in self._firsts:
            return False
        tail = text[at:]
        return any(len(s) > len(tail) and s.startswith(tail) for s in self._stop)

    def finish(self, text: str, matched: str | None) -> str:
        """Take the text of the token that ended the sequence; returns the rest of the answer.

        ``matched`` is the stop string that the engine reports, None when it ended for another reason.
        """
        window = self._held + text
        old = len(self._held)
        self._held = ""
        if matched not in self._stop or matched is None:
            return window
        start = window.find(matched, max(0, old - len(matched) + 1))
        if start < 0:
            return window
        return window[: start + len(matched)] if self._include else window[:start]
