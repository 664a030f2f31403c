"""Recordings of what a model said, and replays without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bough as sgl

from .test_beyond import two


def test_record_and_replay(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    model = sgl.FakeBackend({"x$": ["one", "uno"], "y$": "two", "z$": "yes"}, chat_template="chatml")

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("x" + sgl.gen("a")) + "y" + sgl.gen("b", type=str) + "z" + sgl.select("c", ["no", "yes"])

    said = program.run(backend=sgl.record(path, model))
    said.sync()
    again = program.run(backend=sgl.replay(path))
    assert again.text() == said.text() and again["c"] == "yes"
    with pytest.raises(sgl.ProgramError, match="no answer to this call behind 'x'"):
        two.run(backend=sgl.replay(path))["a"]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("replayed", [False, True])
def test_a_recording_is_the_same_for_streams(tmp_path: Path, recorded: bool, replayed: bool) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + sgl.gen("a") + "y" + sgl.gen("b", type=int)

    path, model = tmp_path / "talk.jsonl", sgl.FakeBackend({"x$": "one two three", "y$": "4"})
    said = program.run(backend=sgl.record(path, model), stream=recorded)
    said.sync()
    again = program.run(backend=sgl.replay(path), stream=replayed)
    assert again.text() == said.text() and again["b"] == 4
    if replayed:
        pieces = [piece for piece, _ in again.stream_executor.pieces["a"]]
        assert pieces == (["one", " two", " three"] if recorded else ["one two three"])
    assert again.get_meta_info("a") == said.get_meta_info("a")
    assert again.report().total.generated == said.report().total.generated == 4


def test_recordings_hold_any_text(tmp_path: Path) -> None:
    path, said = tmp_path / "talk.jsonl", "one\u2028two\x85\u2029 \ud83d end\r\n\\"
    two.run(backend=sgl.record(path, sgl.FakeBackend({"x$": said, "y$": "ok"}))).sync()
    path.read_text(encoding="utf-8")
    assert two.run(backend=sgl.replay(path))["a"] == said


def test_a_recording_answers_as_often_as_it_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    backend = sgl.record(path, sgl.FakeBackend({"x$": ["1", "2"], "y$": "ok"}))
    assert [two.run(backend=backend)["a"] for _ in range(2)] == ["1", "2"]
    again = sgl.replay(path)
    assert [two.run(backend=again)["a"] for _ in range(2)] == ["1", "2"]
    with pytest.raises(sgl.ProgramError, match="no answer to this call behind 'x'"):
        two.run(backend=again)["a"]


def test_a_recording_that_was_cut_says_where(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    two.run(backend=sgl.record(path, sgl.FakeBackend())).sync()
    whole = path.read_bytes()
    wrong = {b"": 1, whole[:20]: 1, whole[:-20]: 3, whole + b"[]\n": 4, whole + b"\xff\n": 4, whole + b"{}\n": 4}
    for data, line in wrong.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"talk.jsonl, line {line}: it is"):
            sgl.replay(path)
