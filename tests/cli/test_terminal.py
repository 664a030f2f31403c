"""``generate`` and ``chat`` with an engine that says what it was told to."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Sequence

import pytest

from bough.base.errors import InvalidRequest
from bough.base.messages import Finish
from bough.cli import terminal
from bough.cli.main import main
from bough.engine.generation import Chunk, GenerateOptions


class Engine:
    """Answers with the words of ``answer`` and remembers the prompts."""

    def __init__(self, answer: str = "all is well", finish: Finish | None = None) -> None:
        self.template: object | None = object()
        self.prompts: list[object] = []
        self.options: GenerateOptions | None = None
        self.closed = False
        self.answer, self.finish = answer, finish or Finish("stop")

    async def render_chat(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        return [dict(m) for m in messages]

    async def stream(self, prompt: str | Sequence[int], options: GenerateOptions) -> AsyncIterator[Chunk]:
        if prompt == "bad":
            raise InvalidRequest("the prompt is bad")
        self.prompts.append(prompt)
        self.options = options
        words = self.answer.split(" ")
        for i, word in enumerate(words):
            last = i + 1 == len(words)
            yield Chunk(0, word if last else word + " ", [i], 7, 5, i + 1, self.finish if last else None)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    engine = Engine()

    async def launch(arguments: object) -> Engine:
        return engine

    monkeypatch.setattr(terminal, "launch", launch)
    return engine


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_generate_streams_the_text(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "tell me", "--seed", "3", "--max-tokens", "9", "--stop", "x", "--stop", "y"]) == 0
    assert capsys.readouterr().out == "all is well\n"
    assert engine.prompts == ["tell me"] and engine.closed
    assert engine.options is not None
    params = engine.options.params
    assert (params.seed, params.max_tokens, params.temperature, params.stop) == (3, 9, 0.0, ("x", "y"))


def test_generate_reads_standard_input(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "first", "second")
    assert main(["generate", "-"]) == 0
    assert engine.prompts == ["first\nsecond\n"]


def test_a_refused_prompt_is_one_line(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "bad"]) == 1
    assert capsys.readouterr().err == "bough: the prompt is bad\n"
    assert engine.closed


def test_a_failed_generation_exits_with_one(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.finish = Finish("error", message="the device is gone", status=500)
    assert main(["generate", "x"]) == 1
    assert "the device is gone" in capsys.readouterr().err


def test_chat_keeps_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(monkeypatch, "hello", "", "and now?", "/reset", "again", "/exit", "never said")
    assert main(["chat", "--system", "be kind"]) == 0
    system = {"role": "system", "content": "be kind"}
    hello = {"role": "user", "content": "hello"}
    answer = {"role": "assistant", "content": "all is well"}
    assert engine.prompts == [
        [system, hello],
        [system, hello, answer, {"role": "user", "content": "and now?"}],
        [system, {"role": "user", "content": "again"}],
    ]
    assert capsys.readouterr().out == "all is well\n" * 3 and engine.closed


def test_chat_ends_with_the_input(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    type_lines(monkeypatch, "hello")
    assert main(["chat"]) == 0
    assert engine.closed


def test_chat_needs_a_template(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.template = None
    assert main(["chat"]) == 1
    assert "no chat template" in capsys.readouterr().err and engine.closed


def test_figures_are_for_terminals(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x"]) == 0
    assert capsys.readouterr().err == ""
    turn = terminal.Turn("t", Finish("stop"), 12, 8, 11, 0.5, 1.5)
    assert turn.figures() == "[12 prompt tokens, 8 cached; first text after 500 ms; 11 generated, 10 tokens/s]"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out.startswith("bough ")
