"""Patterns of white space are taken by their meaning."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.base.constraint import Constraint
from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.grammar.admission import check_constraint
from bough.grammar.whitespace import JSON_SPACE, written_whitespace

TEXTS = [
    "",
    *(a + b for a in JSON_SPACE for b in ("", *JSON_SPACE)),
    "   ",
    "\n    ",
    "\t\t\t",
    " x",
    "x",
    "\f",
    "\xa0",
]


def same(pattern: str) -> bool:
    """Whether what is written matches what the pattern does of JSON's white space, and nothing else."""
    written = re.compile(written_whitespace(pattern))
    return all(
        bool(written.fullmatch(text)) == (not set(text) - set(JSON_SPACE) and bool(re.fullmatch(pattern, text)))
        for text in TEXTS
    )


@pytest.mark.parametrize("pattern", [
    r"[\n\t ]*", r"[ \n]?", r"\s*", "( |\\n)*", r"[ \n]{0,20}", r"^\s*$", r"\A\s+\Z", r"[\x20\n]*", r"[\u0020\t]",
    " {,2}", r"\s*?",
    r"(?:\r?\n)? *", r"[^\S]*", r"[^\S\n]{2}", r"\ ?", "", "()", r"(?P<gap> )?", r"[ \f\n\r\t\v]*", r"[\t-\r ]+",
    r"\s{2,}", r" |\n|\t\t", "^$",
])  # fmt: skip
def test_white_space_is_taken(pattern: str) -> None:
    if "{," not in pattern:  # which Python's version decides on
        assert same(pattern)
    check_constraint(Constraint(kind="json_schema", text="{}", whitespace=pattern or "compact"), DEFAULT_LIMITS)


def test_a_count_may_begin_with_nothing() -> None:
    assert written_whitespace(" {,2}") == "[ ]{0,2}" and written_whitespace(r"\x{20}") == "[ ]"


@pytest.mark.parametrize(("pattern", "reason"), [
    (".*", "no white space"), ("[_]?", "matches '_'"), (r"\S", "matches"), (r"[^a]", "matches"), ("a", "matches 'a'"),
    (r"\f", "does not allow"), (r"\xa0", "does not allow"), (r"\d", "no white space"), ("( ", "not closed"),
    (" )", "alone"),
    ("[ ", "not in its place"), ("*", "not in its place"), (" {3,1}", "backwards"), (" {,}", "counts nothing"),
    (" ^ ", "not in its place"), (r"(?= )", "not in its place"), (r" \b", "no white space"),
    (r"[\]]", "no white space"),
    (r"[ -~]", "matches '!'"), (r"\u{110000}", "no character"), ("\\", "not complete"), (r"[\r-\t]", "no range"),
    (" {1000}", "not in its place"), (r"[\x20-\uffff]", "matches"),
])  # fmt: skip
def test_anything_else_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="white space") as refused:
        check_constraint(Constraint(kind="json_schema", text="{}", whitespace=pattern), DEFAULT_LIMITS)
    assert reason in refused.value.message, refused.value.message


@given(
    st.lists(st.sampled_from([*r" \n[]^-|()?*+{}.a0,", r"\s", r"\t", "{1,2}", "(?:", r"\x20", "[ ", "]"]), max_size=9)
)
def test_what_is_taken_is_white_space(pieces: list[str]) -> None:
    pattern = "".join(pieces)
    try:
        written = re.compile(written_whitespace(pattern))
    except ValueError:
        return
    assert not any(written.fullmatch(text) for text in TEXTS if set(text) - set(JSON_SPACE))
    try:
        read = re.compile(pattern)
    except re.error:
        return
    if not re.search(r"[?*+}][?+]|\{,", pattern):  # which differ in what backtracks, and between versions
        for text in TEXTS:
            assert bool(written.fullmatch(text)) <= bool(read.fullmatch(text)), pattern
