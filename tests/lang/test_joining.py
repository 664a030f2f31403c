"""Joins that need not wait for everybody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import bough as sgl
from bough.lang.backends.base import AsyncBackend


class Gated(AsyncBackend):
    """Answers the branch that it is told to, counts who is stopped."""

    def __init__(self, answers: dict[str, str], held: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.answers, self.held = answers, held
        self.stopped: list[str] = []
        self.running = 0
        self.most = 0

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        key = s.text_[-1]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if key in self.held:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.stopped.append(key)
            raise
        finally:
            self.running -= 1
        if self.answers[key] == "FAIL":
            raise RuntimeError("no luck")
        return self.answers[key], {"completion_tokens": 1, "prompt_tokens": 4, "cached_tokens": 3}


@sgl.function
def vote(s: Any, branches: str, **how: Any) -> Any:
    s += "x"
    forks = s.fork(len(branches))
    for fork, branch in zip(forks, branches):
        fork += branch + sgl.gen("v")
    return forks.join(**how)


def test_join_first_valid_stops_the_others() -> None:
    backend = Gated({"a": "bad", "b": "good", "c": "FAIL"}, held=("d", "e"))
    state = vote.run("acbde", mode="first_valid", name="v", valid=lambda v: v == "good", backend=backend)
    assert state["v"] == "good" and state.ret_value == [2]
    assert sorted(backend.stopped) == ["d", "e"]
    assert state.report().total.wasted == 1  # of "bad"


def test_what_comes_in_while_a_loser_is_stopped_is_wasted() -> None:
    class Late(Gated):
        async def agenerate(self, s: Any, sampling_params: Any) -> Any:
            try:
                return await super().agenerate(s, sampling_params)
            except asyncio.CancelledError:  # the answer was on its way
                return "late", {"completion_tokens": 7}

    backend = Late({"a": "first"}, held=("b",))
    state = vote.run("ab", mode="first_valid", name="v", backend=backend)
    assert state.ret_value == [0] and (state.report().total.generated, state.report().total.wasted) == (8, 7)


def test_join_majority_stops_when_it_is_decided() -> None:
    backend = Gated({"a": "1", "b": "2", "c": " 1", "d": "1"}, held=("e",))
    state = vote.run("abcde", mode="majority", name="v", key=str.strip, backend=backend)
    assert state["v"].strip() == "1" and state.ret_value == [0, 2, 3]
    split = vote.run("ab", mode="majority", name="v", backend=Gated({"a": "1", "b": "2"}))
    assert split["v"] in ("1", "2")


def test_join_predicate_gathers_from_the_finished() -> None:
    backend = Gated({"a": "1", "b": "2"}, held=("c",))
    state = vote.run("abc", mode="predicate", until=lambda done: len(done) == 2, backend=backend)
    assert state["v"] == ["1", "2"]


def test_join_needs_the_variable_that_it_is_of() -> None:
    for mode in ("first_valid", "majority"):
        with pytest.raises(sgl.ProgramError, match="none has the variable 'typo'"):
            vote.run("ab", mode=mode, name="typo", backend=Gated({"a": "1", "b": "2"}))
    with pytest.raises(ValueError, match="needs the name"):
        vote.run("ab", mode="majority", backend=Gated({"a": "1", "b": "1"}))


def test_join_takes_all_that_was_asked_of_the_winner() -> None:
    @sgl.function
    def both(s: Any, **how: Any) -> Any:
        s += "x"
        forks = s.fork(2)
        forks += lambda i: "ab"[i] + sgl.gen("v")
        forks += lambda i: "cd"[i] + sgl.gen("w")
        return forks.join(**how)

    answers = {"a": "1", "b": "1", "c": "2", "d": "2"}
    state = both.run(mode="first_valid", name="v", backend=Gated(answers, held=("b",)))
    assert state.ret_value == [0] and state["v"] == "1" and "w" in state and state["w"] == "2"
    with pytest.raises(sgl.ProgramError, match="no luck"):
        both.run(mode="first_valid", name="v", backend=Gated(answers | {"c": "FAIL", "d": "FAIL"}))


def test_each_value_is_judged_once() -> None:
    judged: list[Any] = []

    def valid(value: Any) -> bool:
        judged.append(value)
        return False

    with pytest.raises(sgl.ProgramError, match="first_valid"):
        vote.run("abc", mode="first_valid", name="v", valid=valid, backend=Gated({"a": "1", "b": "FAIL", "c": "FAIL"}))
    assert judged == ["1"]


def test_what_decides_a_join_may_give_anything_and_fail() -> None:
    backend = Gated({"a": "1", "b": "2", "c": "1"})
    assert vote.run("abc", mode="majority", name="v", key=lambda v: [v], backend=backend).ret_value == [0, 2]

    def fails(value: Any) -> Any:
        raise LookupError("no way")

    for how in ({"mode": "first_valid", "valid": fails}, {"mode": "majority", "key": fails}):
        backend = Gated({"a": "1"}, held=("b",))

        @sgl.function
        def voting(s: Any, how: Any) -> None:
            s += "x"
            forks = s.fork(2)
            forks += lambda i: "ab"[i] + sgl.gen("v")
            with pytest.raises(LookupError, match="no way"):
                forks.join(name="v", **how)
            forks[1].sync()

        voting.run(how, backend=backend)
        assert backend.stopped == ["b"]


def test_join_says_when_nobody_will_do() -> None:
    with pytest.raises(sgl.ProgramError, match="no luck"):
        vote.run("aa", mode="first_valid", name="v", backend=Gated({"a": "FAIL"}))
    with pytest.raises(sgl.ProgramError, match="state 1 of the fork.*no luck"):
        vote.run("ba", backend=Gated({"a": "FAIL", "b": "1"}))
    with pytest.raises(sgl.ProgramError, match="to be joined.*no luck"):
        vote.run("ba", mode="concate_and_append", backend=Gated({"a": "FAIL", "b": "1"}))
