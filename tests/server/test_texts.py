"""Texts that the server keeps for programs: the same as writing each of them out, within their room."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.base.errors import InvalidRequest
from bough.server.schema import Prefix
from bough.server.texts import CHAIN, ProgramTexts, UnknownText

STEPS = st.lists(
    st.tuples(st.sampled_from("pq"), st.integers(0, 4), st.none() | st.integers(0, 4), st.integers(0, 99), st.text()),
    max_size=90,
)


@settings(deadline=None)
@given(STEPS)
def test_a_kept_text_is_what_was_sent(steps: list[tuple[str, int, int | None, int, str]]) -> None:
    texts, twin = ProgramTexts(1 << 20), dict[tuple[str, str], str]()
    for program, node, base, chars, rest in steps:
        name = (program, f"n{node}")
        if base is None:
            prefix, before = None, ""
        else:
            prefix = Prefix(program=program, node=f"n{base}", chars=chars if chars < 50 else None)
            if (program, prefix.node) not in twin:
                assert texts.keep("t", program, name[1], prefix, rest).chars == 0
                continue
            whole = twin[program, prefix.node]
            if prefix.chars is not None and chars > len(whole):
                with pytest.raises(InvalidRequest, match="characters"):
                    texts.find("t", prefix)
                continue
            before = whole[: prefix.chars]
            assert texts.find("t", prefix) == before
        twin[name] = before + rest
        assert texts.keep("t", program, name[1], prefix, rest).chars == len(before + rest)
    for (program, node), text in twin.items():
        assert texts.find("t", Prefix(program=program, node=node)) == text


def test_turns_without_end_stay_short_chains() -> None:
    texts, whole = ProgramTexts(1 << 20), ""
    for turn in range(10 * CHAIN):
        prefix = Prefix(program="p", node=f"n{turn - 1}") if turn else None
        texts.keep("", "p", f"n{turn}", prefix, f"turn {turn}. ")
        whole += f"turn {turn}. "
    assert texts.find("", Prefix(program="p", node=f"n{10 * CHAIN - 1}")) == whole


def test_programs_go_as_a_whole_the_longest_unused_first() -> None:
    texts = ProgramTexts(5000)
    for program in "abc":
        assert texts.keep("", program, "n", None, program * 1000).chars == 1000
    texts.find("", Prefix(program="a", node="n"))
    assert texts.keep("", "d", "n", None, "d" * 1000).chars == 1000
    assert texts.find("", Prefix(program="a", node="n")) == "a" * 1000
    with pytest.raises(UnknownText):
        texts.find("", Prefix(program="b", node="n"))
    assert texts.keep("", "e", "n", None, "e" * 9000).chars == 0, "more than there is room for"
    texts.forget("", "e")
    assert texts.keep("", "f", "n", None, "f" * 4000).chars == 4000


def test_what_was_replaced_takes_no_room() -> None:
    texts = ProgramTexts(100_000)
    texts.keep("", "other", "n", None, "o" * 1000)
    for turn in range(200):
        assert texts.keep("", "p", "n", None, f"{turn}" * 10_000).chars
    assert texts.find("", Prefix(program="other", node="n")) == "o" * 1000
    # A text stays as long as others rest on it, whatever its name stands for by then.
    texts.keep("", "p", "n", None, "a" * 50_000)
    texts.keep("", "p", "m", Prefix(program="p", node="n"), "b")
    texts.keep("", "p", "n", None, "c")
    assert texts.find("", Prefix(program="p", node="m")) == "a" * 50_000 + "b"
    assert not texts.keep("", "p", "x", None, "d" * 60_000).chars


def test_one_tenants_texts_cost_no_other_tenants() -> None:
    texts = ProgramTexts(20_000)
    assert texts.keep("a", "p", "n", None, "a" * 5000).chars == 5000
    for i in range(50):
        assert texts.keep("b", f"p{i}", "n", None, "b" * 1000).chars == 1000
    assert texts.find("a", Prefix(program="p", node="n")) == "a" * 5000
    assert texts.find("b", Prefix(program="p49", node="n")) == "b" * 1000
    with pytest.raises(UnknownText):
        texts.find("b", Prefix(program="p0", node="n"))


def test_what_one_program_has_from_another_is_its_own() -> None:
    """However it is put together, what is kept is within the room."""
    texts = ProgramTexts(1 << 20)
    tracemalloc.start()
    try:
        for i in range(200):
            texts.keep("", f"p{i}", "n", None, f"{i:04}" * 16_384)
            texts.keep("", "hold", f"n{i}", Prefix(program=f"p{i}", node="n"), "")
            if i % 2:
                texts.forget("", f"p{i}")
        for i in range(200):
            texts.keep("", f"{i:04}" * 4096, f"{i:04}" * 16_384, None, "")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1.3 * (1 << 20)
    texts.keep("", "p", "n", None, "one two")
    assert texts.keep("", "q", "m", Prefix(program="p", node="n", chars=3), " four").chars == 8
    texts.forget("", "p")
    assert texts.find("", Prefix(program="q", node="m")) == "one four"


def test_a_call_that_was_made_twice_is_not_confused_with_itself() -> None:
    """Of two attempts at one call the first may end last; its client goes on from the other."""
    texts = ProgramTexts(5000)
    meant = texts.keep("", "p", "n", None, "one two").id
    late = texts.keep("", "p", "n", None, "one six").id
    assert meant != late
    with pytest.raises(UnknownText):
        texts.find("", Prefix(program="p", node="n", id=meant))
    assert texts.keep("", "p", "m", Prefix(program="p", node="n", id=meant), "x") == (0, "")
    assert texts.find("", Prefix(program="p", node="n", id=late)) == "one six"
    assert texts.find("", Prefix(program="p", node="n")) == "one six"


def test_tenants_and_ended_programs_are_unknown() -> None:
    texts = ProgramTexts(5000)
    texts.keep("one", "p", "n", None, "secret")
    for tenant, program in (("two", "p"), ("one", "q")):
        with pytest.raises(UnknownText):
            texts.find(tenant, Prefix(program=program, node="n"))
    texts.forget("one", "p")
    texts.forget("one", "p")
    with pytest.raises(UnknownText):
        texts.find("one", Prefix(program="p", node="n"))
