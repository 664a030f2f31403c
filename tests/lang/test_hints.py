"""What the engine is told of a program beside its texts: pauses, priorities, leases."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

import bough as sgl
from bough.lang.habits import PLACES, Habits
from bough.lang.tools import _expected_pause, as_tool

from .openai_stub import answering
from .stub import Stub, serving

TEXT = "the cat sat on the mat " * 20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by which calls are measured; it stands still but for who adds to it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def sent(server: Stub) -> list[dict[str, Any]]:
    """The bodies of the requests to /generate."""
    return [body for _, path, _, body in server.taken() if path == "/generate"]


def step(tool: str, **arguments: Any) -> str:
    return json.dumps({"tool": tool, "arguments": arguments})


@sgl.tool(pause=7.0)
def look(city: str) -> int:
    """How many live there."""
    return len(city)


@sgl.function
def agent(s: Any, tool: Any) -> None:
    s += sgl.user("how many?")
    s += sgl.act("a", tools=[tool], max_steps=2)


def test_the_pause_that_a_tool_declares_is_told_while_it_may_be_called() -> None:
    with serving(program_protocol=1) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        server.replies += [step("look", city="a"), step("look", city="b"), step("answer", answer="2")]
        assert agent.run(look, backend=backend)["a"] == "2"
        assert [body["program"].get("pause") for body in sent(server)] == [7.0, 7.0, None]
        backend.shutdown()


def test_the_pause_of_a_tool_is_measured(clock: list[float]) -> None:
    def slow(city: str) -> int:
        clock[0] += 3.0
        return 1

    with serving(program_protocol=1) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        for told in ([None, 3.0], [3.0, 3.0]):
            server.replies += [step("slow", city="a"), step("answer", answer="1")]
            assert agent.run(slow, backend=backend)["a"] == "1"
            assert [body["program"].get("pause") for body in sent(server)] == told
        backend.shutdown()


def test_one_rare_slow_tool_does_not_decide() -> None:
    def fast() -> int: ...
    def slow() -> int: ...

    tools, habits = [as_tool(fast), as_tool(slow)], Habits()
    assert _expected_pause(tools, habits) is None
    habits.paused("slow", 600.0)
    habits.paused("fast", 0.1)
    assert _expected_pause(tools, habits) == 600.0, "as likely as the other"
    for _ in range(20):
        habits.paused("fast", 0.1)
    assert _expected_pause(tools, habits) == pytest.approx(0.1)


class Told(sgl.FakeBackend):
    """Remembers the envelopes of its calls by their variables."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, list[dict[str, Any]]] = {}

    def _note(self, s: Any) -> None:
        self.told.setdefault(s.current.name, []).append(s.envelope())

    async def agenerate(self, s: Any, sampling_params: Any) -> Any:
        self._note(s)
        return await super().agenerate(s, sampling_params)

    async def aselect(self, s: Any, *options: Any) -> Any:
        self._note(s)
        return await super().aselect(s, *options)


def test_the_pause_behind_a_place_is_what_it_was_in_earlier_runs(clock: list[float]) -> None:
    @sgl.function
    def program(s: Any, seconds: float) -> None:
        s += "x" + sgl.gen("a")
        assert s["a"]
        clock[0] += seconds
        s += "y" + sgl.select("b", ["c", "d"])
        assert s["b"]
        clock[0] += 2 * seconds
        s += sgl.gen("z")
        assert s["z"]

    backend = Told()
    for seconds in (4.0, 4.0, 8.0, 0.0):
        program.run(seconds, backend=backend)
    assert [t.get("pause") for t in backend.told["a"]] == [None, 4.0, 4.0, 5.2]
    assert [t.get("pause") for t in backend.told["b"]] == [None, 8.0, 8.0, 10.4]
    assert not any("pause" in t for t in backend.told["z"]), "nothing ever followed"


def test_a_pause_ends_with_the_first_call_of_any_branch(clock: list[float]) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("plan")
        assert s["plan"]
        clock[0] += 1.0
        forks = s.fork(3)
        for fork in forks:
            fork += sgl.gen("f")
            assert fork["f"]
            clock[0] += 9.0
        forks.join()
        s += sgl.gen("end")
        assert s["end"]

    backend = Told()
    for _ in range(3):
        program.run(backend=backend)
    assert [t.get("pause") for t in backend.told["plan"]] == [None, 1.0, 1.0]


def test_pauses_and_leases_reach_openai_clients_of_bough(clock: list[float]) -> None:
    @sgl.function(priority=2)
    def program(s: Any) -> None:
        s += sgl.system(TEXT)
        s.lease(600)
        for name in "ab":
            s += sgl.user("q") + sgl.assistant(sgl.gen(name, max_tokens=4))
            assert s[name]
            clock[0] += 2.5

    for owner in ("bough", "somebody"):
        with answering(sgl, "m", owner) as (backend, taken):
            for _ in range(2):
                program.run(backend=backend).sync()
        bodies = [body for path, body in taken if path.endswith("/completions")]
        envelopes = [body.get("program") for body in bodies]
        if owner == "somebody":
            assert envelopes == [None] * 4 and not any("prompt_cache_options" in body for body in bodies)
            continue
        assert [e.get("pause") for e in envelopes] == [None, None, 2.5, None]
        assert {e["priority"] for e in envelopes} == {2}
        kept = {"ttl": 600.0, "messages": 1}
        assert [body.get("prompt_cache_options") for body in bodies] == [kept, None, kept, None]


@sgl.function
def leasing(s: Any) -> None:
    s += TEXT
    s.lease(60)
    s += "and" + sgl.gen("a", max_tokens=2)
    s.lease(30)


def test_a_lease_is_asked_for_with_the_text_so_far() -> None:
    with serving(program_protocol=1) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        state = leasing.run(backend=backend)
        text = state.text()
        bodies = sent(server)
        assert [(body["text"], body.get("lease")) for body in bodies] == [
            (TEXT, 60.0), (TEXT + "and", None), (text, 30.0),
        ]  # fmt: skip
        assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [0, 2, 0]
        assert len({body["program"]["id"] for body in bodies}) == 1
        assert [call.kind for call in state.report().calls] == ["lease", "generate", "lease"]
        backend.shutdown()


def test_leases_are_nothing_to_other_servers_and_to_traces() -> None:
    with serving() as server:
        backend = sgl.RuntimeEndpoint(server.url)
        state = leasing.run(backend=backend)
        state.sync()
        (body,) = sent(server)
        assert "lease" not in body and [call.kind for call in state.report().calls] == ["generate"]
        backend.shutdown()
    assert leasing.run(backend=sgl.FakeBackend()).error() is None
    assert leasing.trace().text() == TEXT + "and{a}"
    with pytest.raises(ValueError, match="a number of seconds, not for 0"):
        state.lease(0)


def test_priorities_are_of_programs_and_of_single_uses() -> None:
    @sgl.function(priority=3)
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a")

    backend = Told()
    for used in (program, program.bind(), program.options(priority=-1), program.options(priority=0)):
        used.run(backend=backend).sync()
    assert [t.get("priority") for t in backend.told["a"]] == [3, 3, -1, None]


def test_places_that_programs_make_up_are_forgotten() -> None:
    habits = Habits()
    for i in range(10 * PLACES):
        for _ in range(2):
            habits.learn((None, f"n{i}"), f"what follows the answer {i}")
            habits.paused((None, f"n{i}"), 1.0)
    assert habits.after((None, f"n{i}")).endswith(str(i)) and habits.pause((None, f"n{i}")) == (1.0, 2)
    assert not habits.after((None, "n0")) and habits.pause((None, "n0")) == (None, 0)
