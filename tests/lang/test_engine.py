"""Programs on a real engine in this process, and on a real server of bough."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bough as sgl
from bough.lang.waiting import settled, wait_for
from tests.e2e.serving import TINY, running

STREAMED = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(str(tiny_model), pool_tokens=8192, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def endpoint(tiny_model: Path) -> Iterator[sgl.RuntimeEndpoint]:
    with running(str(tiny_model), *TINY) as server:
        yield sgl.RuntimeEndpoint(server.url)


@sgl.function
def chat(s: Any) -> None:
    s += sgl.system("the cat")
    s += sgl.user("sat on the mat")
    s += sgl.assistant(sgl.gen("a", max_tokens=6, ignore_eos=True))
    s += sgl.user("and the dog")
    s += sgl.assistant(sgl.gen("b", max_tokens=4, ignore_eos=True, return_logprob=True))
    s += "on" + sgl.select("c", [" the log", " the mat", " it"])
    s += sgl.select("d", [" a", " bb"], choices_method=sgl.unconditional_likelihood_normalized)
    forks = s.fork(3)
    forks += lambda i: f"{i}" + sgl.gen("f", max_tokens=2, ignore_eos=True)
    forks.join()


def test_engine_and_server_agree(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    here, there = chat.run(backend=engine, temperature=0), chat.run(backend=endpoint, temperature=0)
    assert here.text() == there.text() and here.messages() == there.messages()
    for name in "abcdf":
        assert here[name] == there[name]
    assert here.text().startswith("<|im_start|>system\nthe cat<|im_end|>\n<|im_start|>user\nsat on the mat<|im_end|>\n")
    for meta in (here.get_meta_info("b"), there.get_meta_info("b")):
        assert meta["completion_tokens"] == 4 == len(meta["output_token_logprobs"]) and meta["cached_tokens"] > 10
    scores = [s.get_meta_info("c")["normalized_prompt_logprobs"] for s in (here, there)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_streams_are_the_answers(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    for backend in (engine, endpoint):
        state = chat.run(backend=backend, temperature=0, stream=True)
        assert "".join(state.text_iter("a")) == state["a"]
        assert "".join(state.text_iter()) == state.text()


def test_types_are_enforced(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def typed(s: Any) -> None:
        s += "the " + sgl.gen("i", type=int, max_tokens=24) + " dog " + sgl.gen("b", type=bool)
        s += sgl.gen("l", type=list[bool], max_tokens=64)

    for backend in (engine, endpoint):
        state = typed.run(backend=backend)
        assert isinstance(state["i"], int) and isinstance(state["b"], bool)


def test_several_samples(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def samples(s: Any) -> None:
        s += "the cat" + sgl.gen("x", max_tokens=3, n=3, ignore_eos=True)

    for backend, stream in itertools.product((engine, endpoint), (False, True)):
        state = samples.run(backend=backend, temperature=1.0, stream=stream)
        assert "".join(state.text_iter()) == state.text() == "the cat" + state["x"][0]
        assert len(state["x"]) == 3 == len(state.get_meta_info("x"))


def test_batches(engine: sgl.Engine) -> None:
    @sgl.function
    def one(s: Any, q: str) -> None:
        s += "the cat sat on the mat and the dog sat on the log " + q + sgl.gen("x", max_tokens=3, ignore_eos=True)

    batch = one.run_batch([{"q": str(i)} for i in range(40)], backend=engine, temperature=0, progress_bar=False)
    alone = [one.run(q=str(i), backend=engine, temperature=0)["x"] for i in (0, 17, 39)]
    assert [batch[i]["x"] for i in (0, 17, 39)] == alone


def test_a_cancelled_program_leaves_the_engine(engine: sgl.Engine) -> None:
    @sgl.function
    def long(s: Any) -> None:
        s += "the" + sgl.gen("x", max_tokens=200, ignore_eos=True)

    state = long.run(backend=engine, stream=True)
    next(state.text_iter("x"))
    state.cancel()
    state.sync()
    with pytest.raises(sgl.ProgramError):
        state["x"]
    report = state.report()
    assert chat.run(backend=engine, temperature=0)["a"] and report.calls[0].error


def test_errors_say_what_the_engine_said(engine: sgl.Engine, endpoint: sgl.RuntimeEndpoint) -> None:
    @sgl.function
    def too_long(s: Any) -> None:
        s += "the cat " * 300 + sgl.gen("x")

    for backend in (engine, endpoint):
        with pytest.raises(sgl.ProgramError, match="maximum context length"):
            too_long.run(backend=backend)["x"]

    @sgl.function
    def picture(s: Any) -> None:
        s += sgl.image(b"png") + sgl.gen("x", max_tokens=1)

    with pytest.raises(sgl.ProgramError, match="no images"):
        picture.run(backend=engine)["x"]


def test_control(endpoint: sgl.RuntimeEndpoint, engine: sgl.Engine) -> None:
    assert sgl.get_server_info(endpoint)["status"] == "ready"
    sgl.flush_cache(endpoint)
    sgl.flush_cache(engine)


SCRIPT = """
import sglang as sgl
from sglang.lang.chat_template import get_chat_template
from sglang.lang.ir import REGEX_INT, SglGen
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.test.test_utils import select_sglang_backend
from sglang.utils import dump_state_text, read_jsonl
import sglang.lang.interpreter
import json, sys

sgl.set_default_backend(RuntimeEndpoint(sys.argv[1]))

@sgl.function
def qa(s, question):
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer", max_tokens=3))

state = qa.run(question="the cat", temperature=0)
assert isinstance(state, sglang.lang.interpreter.ProgramState)
print(json.dumps([state["answer"], get_chat_template("qwen").name, REGEX_INT, sgl.__version__]))
"""


def test_scripts_import_sglang(endpoint: sgl.RuntimeEndpoint, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "bough.compat.sglang", str(script), endpoint.base_url]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)[1:] == ["qwen", r"[-+]?[0-9]+[ \n]*", sgl.__version__]


def test_programs_end(engine: sgl.Engine) -> None:
    """The engine forgets them, whether or not their last call was known to be that."""

    @sgl.function
    def read(s: Any) -> None:
        s += "the cat" + sgl.gen("a", max_tokens=3)
        assert s["a"] is not None

    read.run(backend=engine).sync()
    chat.run(backend=engine).sync()
    wait_for(settled(engine.loop), engine.loop)
    assert wait_for(engine.asynchronous.client.control("programs", tenant=""), engine.loop).programs == []
