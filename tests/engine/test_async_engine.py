"""Text in, text out, over a scripted engine in a thread."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.base.errors import ConfigError, EngineError, InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.base.messages import Finish
from bough.base.params import SamplingParams
from bough.engine import async_engine
from bough.engine.async_engine import LONG_TEXT, AsyncEngine
from bough.engine.driver import Driver
from bough.engine.generation import Chunk, GenerateOptions
from bough.engine.ipc import SocketPort
from bough.engine.launch import make_run_dir
from bough.engine.local_client import LocalClient
from bough.engine.text import load_text

from .scripted import HOLD, LENGTH, RAISE_IN_RECEIVE, REFUSE, ScriptedCore, ScriptedScheduler
from .vocabulary import write_vocabulary

DEADLINE = 20.0
ANSWER = "Grüße 🙂, welt. END and more"
LIMITS = replace(DEFAULT_LIMITS, n=4)


@asynccontextmanager
async def serving(
    folder: Path, text: str = ANSWER, ending: Finish = LENGTH
) -> AsyncIterator[tuple[AsyncEngine, ScriptedScheduler]]:
    tokenizer, template = load_text(write_vocabulary(folder))
    ids = tokenizer.encode(text, add_special=False)
    scheduler = ScriptedScheduler(script=ids, ending=ending)
    client = LocalClient(lambda: ScriptedCore(scheduler, LIMITS, vocab_size=tokenizer.vocab_size))
    await client.start()
    engine = AsyncEngine(client, tokenizer, template)
    try:
        yield engine, scheduler
    finally:
        await engine.close()


def run(folder: Path, body: Callable[[AsyncEngine, ScriptedScheduler], Awaitable[None]], **how: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(DEADLINE), serving(folder, **how) as (engine, scheduler):
            await body(engine, scheduler)

    asyncio.run(main())


def test_text_is_generated_and_streamed_alike(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        ids = engine.tokenizer.encode("hello", add_special=True)
        for prompt in ("hello", ids, np.array(ids, dtype=np.int64)):
            (generation,) = await engine.generate(prompt, GenerateOptions())
            assert generation.text == ANSWER and generation.n_prompt == 5
            chunks = [chunk async for chunk in engine.stream(prompt, GenerateOptions())]
            assert "".join(chunk.text for chunk in chunks) == ANSWER
            assert [chunk.finish for chunk in chunks if chunk.finish] == [LENGTH]
            assert [token for chunk in chunks for token in chunk.tokens] == generation.tokens

    run(tmp_path, body)


def test_a_stop_string_is_never_shown(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        params = SamplingParams(stop=("END",))
        (generation,) = await engine.generate("x", GenerateOptions(params=params))
        assert generation.text == "Grüße 🙂, welt. " and generation.finish.matched == "END"
        (generation,) = await engine.generate("x", GenerateOptions(params=params, include_stop=True))
        assert generation.text == "Grüße 🙂, welt. END"

    run(tmp_path, body, text="Grüße 🙂, welt. END", ending=Finish("stop", "END"))


def test_n_sequences_are_submitted_together_with_seeds_of_their_own(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        top = (1 << 63) - 1
        generations = await engine.generate("x", GenerateOptions(n=3, rid="mine", params=SamplingParams(seed=top)))
        assert [g.index for g in generations] == [0, 1, 2] and {g.text for g in generations} == {ANSWER}
        assert scheduler.seeds == [top, -top - 1, -top]

    run(tmp_path, body)


@pytest.mark.parametrize(("prompt", "options", "param"), [
    ("", GenerateOptions(), "prompt"),
    ([], GenerateOptions(), "prompt"),
    ([1 << 40], GenerateOptions(), "input_ids"),
    ([1 << 70], GenerateOptions(), "input_ids"),
    ([-1], GenerateOptions(), "input_ids"),
    ([258], GenerateOptions(), "input_ids"),
    ([1.5], GenerateOptions(), "input_ids"),
    ([True], GenerateOptions(), "input_ids"),
    ([[1], [2, 3]], GenerateOptions(), "input_ids"),
    ([["a"]], GenerateOptions(), "input_ids"),
    ("x", GenerateOptions(n=0), "n"),
    ("x", GenerateOptions(n=5), "n"),
    ("x", GenerateOptions(rid="r" * 127, n=2), "rid"),
    ("x", GenerateOptions(rid=""), "rid"),
    ("x", GenerateOptions(params=SamplingParams(top_p=0.0)), "top_p"),
    ("x", GenerateOptions(timeout=-1.0), "timeout"),
])  # fmt: skip
def test_bad_input_raises_before_anything_is_submitted(
    tmp_path: Path, prompt: Any, options: GenerateOptions, param: str
) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        with pytest.raises(InvalidRequest) as error:
            await anext(engine.stream(prompt, options))
        assert error.value.param == param
        assert scheduler.steps == 0

    run(tmp_path, body)


def test_a_refusal_raises_and_a_failure_ends_the_stream(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        with pytest.raises(InvalidRequest, match="refused"):
            await anext(engine.stream([REFUSE], GenerateOptions()))
        chunks = [chunk async for chunk in engine.stream([RAISE_IN_RECEIVE], GenerateOptions())]
        assert len(chunks) == 1 and chunks[0].finish is not None and chunks[0].finish.status == 500
        with pytest.raises(EngineError):
            await engine.generate([RAISE_IN_RECEIVE], GenerateOptions())

    run(tmp_path, body)


def test_leaving_a_stream_aborts_all_its_sequences(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        submitted = asyncio.Event()

        async def consume() -> None:
            stream = engine.stream([HOLD], GenerateOptions(n=4))
            asyncio.get_running_loop().call_soon(submitted.set)
            await anext(stream)

        task = asyncio.create_task(consume())
        await submitted.wait()
        task.cancel()
        while len(scheduler.aborted) < 4:
            await asyncio.sleep(0.001)
        (generation,) = await engine.generate("x", GenerateOptions())
        assert generation.text == ANSWER and scheduler.aborted == [HOLD] * 4

    run(tmp_path, body)


def test_long_texts_and_chats_are_encoded_as_short_ones(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        text = "é" * LONG_TEXT
        assert await engine.tokenize(text) == engine.tokenizer.encode(text, add_special=True)
        ids = await engine.render_chat([{"role": "user", "content": "say <|turn|>"}])
        assert engine.tokenizer.decode(ids, skip_special=False) == "<|turn|>user:say <|turn|><|turn|>assistant:"
        turn = engine.tokenizer.token_id("<|turn|>")
        assert ids.count(turn) == 2  # the client's is plain text
        engine.template = None
        with pytest.raises(InvalidRequest):
            await engine.render_chat([{"role": "user", "content": "hi"}])

    run(tmp_path, body)


def test_chunks_are_news_of_their_sequence(tmp_path: Path) -> None:
    async def body(engine: AsyncEngine, scheduler: ScriptedScheduler) -> None:
        counted = dict.fromkeys(range(4), 0)
        ends: list[Chunk] = []
        async for chunk in engine.stream("x", GenerateOptions(n=4)):
            counted[chunk.index] += len(chunk.tokens)
            assert chunk.n_generated == counted[chunk.index]
            ends += [chunk] if chunk.finish else []
        assert sorted(chunk.index for chunk in ends) == [0, 1, 2, 3]

    run(tmp_path, body)


@pytest.mark.parametrize("told", ["model", "broken", "owner/name"])
@pytest.mark.parametrize("served", ["model", "broken"])
def test_the_text_is_read_before_the_engine_is_there_but_is_that_of_its_model(
    told: str, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``told``: what the engine was told to serve, which need not be the file itself. Errors wait for it, too."""
    for name in ("model", "broken"):
        (tmp_path / name).mkdir()
        write_vocabulary(tmp_path / name)
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    read: list[str] = []

    def reading(path: Path) -> Any:
        read.append(path.name)
        return load_text(path)

    monkeypatch.setattr(async_engine, "load_text", reading)
    local = told != "owner/name"

    async def scenario() -> None:
        run_dir = make_run_dir()
        connecting = asyncio.create_task(AsyncEngine.connect(run_dir, str(tmp_path / told) if local else told))
        async with asyncio.timeout(DEADLINE):
            while local and not read:
                await asyncio.sleep(0.01)
        assert not connecting.done()
        driver = Driver(ScriptedCore(path=str(tmp_path / served)), SocketPort(run_dir))
        thread = threading.Thread(target=driver.run)
        thread.start()
        try:
            async with asyncio.timeout(DEADLINE):
                if served == "broken":
                    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
                        await connecting
                else:
                    engine = await connecting
                    assert engine.template is not None and engine.tokenizer.encode("a", add_special=False)
                    await engine.close()
            assert read == ([told] if local else []) + ([served] if told != served else [])
        finally:
            driver.stop()
            await asyncio.to_thread(thread.join)
            shutil.rmtree(run_dir)

    asyncio.run(scenario())
