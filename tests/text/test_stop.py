"""Stop rules: the engine's decision is that of a search in the whole text, and the stream never shows too much."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.base.errors import InvalidRequest
from bough.text.bad_words import bad_word_ids
from bough.text.detokenizer import IncrementalDetokenizer
from bough.text.stop import WINDOW, Match, StopMatcher, StopTrimmer, compile_patterns
from bough.text.tokenizer import Tokenizer

STOPS = st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), max_size=4)
TEXTS = st.text(alphabet="abc é🫠", max_size=24)


def matcher(
    tokenizer: Tokenizer, stop: Sequence[str] = (), regex: Sequence[str] = (), min_tokens: int = 0
) -> StopMatcher:
    return StopMatcher(
        stop, regex, min_tokens, IncrementalDetokenizer(tokenizer, prompt_tail=tokenizer.encode_plain("x"))
    )


def first_match(
    tokenizer: Tokenizer, ids: list[int], stop: list[str], regex: list[str], least: int
) -> tuple[int, Match] | None:
    """Slow twin: after every token, look for all matches in the whole text."""
    stream = IncrementalDetokenizer(tokenizer, prompt_tail=tokenizer.encode_plain("x"))
    text = ""
    for count, token in enumerate(ids, 1):
        old, text = len(text), text + stream.push([token])
        if len(text) == old or count < least:
            continue
        found: list[tuple[int, int, Match]] = []
        for order, string in enumerate(stop):
            for start in range(len(text) - len(string) + 1):
                if text.startswith(string, start) and start + len(string) > old:
                    found.append((start, order, Match("string", string, start, start + len(string))))
        for order, pattern in enumerate(regex, len(stop)):
            for hit in re.finditer(pattern, text, re.ASCII):
                if hit.end() > old:
                    found.append((hit.start(), order, Match("regex", pattern, hit.start(), hit.end())))
        if found:
            return count, min(found, key=lambda item: item[:2])[2]
    return None


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    stop=STOPS,
    regex=st.lists(
        st.sampled_from(["a+b", "c$", "^a", r"\bb\b", "[bc]{3}", "é.", "(a|ab)(c|bcd)", r"a\sb", "(?m)^b"]), max_size=2
    ),
    least=st.integers(0, 6),
    ids=st.lists(st.integers(0, 600), max_size=6),
)
def test_engine_stops_where_a_search_in_the_whole_text_would(
    tokenizer: Tokenizer, text: str, stop: list[str], regex: list[str], least: int, ids: list[int]
) -> None:
    ids = tokenizer.encode_bare(text) + ids
    ours = matcher(tokenizer, stop, regex, least)
    found = None
    for count, token in enumerate(ids, 1):
        if match := ours.push(token):
            found = count, match
            break
    assert found == first_match(tokenizer, ids, stop, regex, least)


def test_window_slides_without_forgetting_where_it_is(smollm: Tokenizer) -> None:
    letter = smollm.token_id("a")
    assert letter is not None
    anchored = matcher(smollm, ["no such text"], ["^aaab", "b{2}$", r"\bab"])
    length = 3 * WINDOW
    assert not any(anchored.push(letter) for _ in range(length))
    assert len(anchored._tail) <= WINDOW + 1
    (b,) = smollm.encode_bare("b")
    assert anchored.push(b) is None
    assert anchored.push(b) == Match("regex", "b{2}$", length, length + 2)
    strings = matcher(smollm, ["abb"])
    assert not any(strings.push(letter) for _ in range(1000)) and len(strings._tail) == 2
    assert strings.push(b) is None and strings.push(b) == Match("string", "abb", 999, 1002)


def test_longest_match_that_a_pattern_can_have(smollm: Tokenizer) -> None:
    (a,), (b,), (c,) = (smollm.encode_bare(x) for x in "abc")
    for between, expected in ((WINDOW - 1, True), (WINDOW, False)):
        ours = matcher(smollm, regex=["ba+c"])
        ours.push(b)
        for _ in range(between):
            ours.push(a)
        assert (ours.push(c) is not None) == expected


@pytest.mark.parametrize(
    "pattern", ["(", "a{1001}", r"(a)\1", "(?=a)", "((a{1,100}){1,100}){1,100}", "a*", "", "a|", "$", "\ud800"]
)
def test_bad_patterns_are_the_clients_fault(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="stop_regex") as caught:
        compile_patterns([pattern])
    assert caught.value.param == "stop_regex"


def test_slow_patterns_are_fast(smollm: Tokenizer) -> None:
    """Exponential for a backtracking engine: this test would never end."""
    ours = matcher(smollm, regex=["(a|a)*b", "(a+)+$x", "((((a*)*)*)*)c"])
    (a,) = smollm.encode_bare("a")
    assert not any(ours.push(a) for _ in range(300))


# ---- the API side


def one_shot(text: str, last: int, matched: str | None, include: bool) -> str:
    if matched is None:
        return text
    start = next(i for i in range(len(text)) if text.startswith(matched, i) and i + len(matched) > last)
    return text[: start + len(matched)] if include else text[:start]


@settings(max_examples=600, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=20),
    stop=STOPS.map(lambda s: [x.replace(" ", "c") for x in s]),
    data=st.data(),
)
def test_stream_is_the_one_shot_answer_for_every_cut(text: str, stop: list[str], data: st.DataObject) -> None:
    last = data.draw(st.integers(0, len(text)), label="begin of the last token")
    ends_here = [s for s in stop if any(text.startswith(s, i) and i + len(s) > last for i in range(len(text)))]
    matched = data.draw(st.sampled_from([None, *ends_here]))
    include = data.draw(st.booleans())
    trimmer = StopTrimmer(stop, include=include)
    shown, edges = "", sorted({0, last, *data.draw(st.lists(st.integers(0, last)))})
    for a, b in zip(edges, edges[1:]):
        shown += trimmer.push(text[a:b])
        assert text.startswith(shown)
        # Nothing shown can turn out to be the beginning of a stop string; nothing more is kept back.
        held = text[len(shown) : b]
        assert not any(
            s.startswith(text[i:b]) and len(s) > b - i for s in stop for i in range(max(0, len(shown) - 4), len(shown))
        )
        assert not held or any(s.startswith(held) and s != held for s in stop)
    shown += trimmer.finish(text[last:], matched)
    assert shown == one_shot(text, last, matched, include)


def test_text_of_a_pattern_stays() -> None:
    trimmer = StopTrimmer(["END"])
    assert trimmer.push("answer 42 EN") == "answer 42 "
    assert trimmer.finish(".", "[0-9]+ EN.") == "EN."


# ---- bad words


def test_bad_words_in_both_places(tokenizer: Tokenizer) -> None:
    found = bad_word_ids(tokenizer, ["hello", " hello", "<s>"])
    assert tuple(tokenizer.encode_bare("hello")) in found and tuple(tokenizer.encode_bare(" hello")) in found
    assert len(found) == len(set(found)) == 4
    assert all(tokenizer.decode(ids).strip() in ("hello", "<s>") for ids in found)
    assert not any(tokenizer.token_id("<s>") in ids for ids in found)
    with pytest.raises(InvalidRequest, match="empty"):
        bad_word_ids(tokenizer, ["  "])
