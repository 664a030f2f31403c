"""The synchronous engine: one prompt, many prompts, streams, and its end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import bough
from bough.base.config import Config
from bough.base.errors import ConfigError, EngineError, InvalidRequest
from bough.base.params import SamplingParams
from bough.engine.engine import Engine, configured, options_of

from .scripted import RAISE_IN_RECEIVE, REFUSE, ScriptedCore, ScriptedScheduler
from .vocabulary import write_vocabulary

ANSWER = "an answer"


class Core(ScriptedCore):
    tokenizer_source: Path


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    """Makes the composition root build scripted engines; those it has built."""
    from bough.engine.text import load_text

    tokenizer, _ = load_text(write_vocabulary(tmp_path))
    cores: list[Core] = []

    def build(config: Config) -> Core:
        if config.model.path == "missing":
            raise ConfigError("no such model")
        script = tokenizer.encode(ANSWER, add_special=False)
        cores.append(Core(ScriptedScheduler(script=script), vocab_size=tokenizer.vocab_size))
        cores[-1].tokenizer_source = tmp_path
        return cores[-1]

    module = ModuleType("bough.engine.build")
    vars(module)["build"] = build
    monkeypatch.setitem(sys.modules, "bough.engine.build", module)
    return cores


@pytest.fixture
def engine(built: list[Core]) -> Iterator[Engine]:
    with Engine() as engine:
        yield engine
    assert built[0].closed


def test_one_prompt_and_many(engine: Engine) -> None:
    assert engine.generate("hi").text == ANSWER
    assert engine.generate([104, 105]).text == ANSWER
    assert engine.generate("hi", max_tokens=2).text == ANSWER[:2]
    assert [g.text for g in engine.generate(["a", "b"], max_tokens=3)] == [ANSWER[:3]] * 2
    assert [g.n_prompt for g in engine.generate([[5], [5, 6]])] == [1, 2]
    assert [g.index for g in engine.generate(["a", "b"], n=2)] == [0, 1, 0, 1]
    assert engine.generate([], progress=True) == []
    assert len(engine.generate(["x"] * 300)) == 300


def test_one_failing_prompt_fails_alone(engine: Engine) -> None:
    results = engine.generate([[5], [REFUSE], [RAISE_IN_RECEIVE], [9999], [6]])
    assert [r.finish.kind for r in results] == ["length", "error", "error", "error", "length"]
    assert [r.finish.status for r in results[1:4]] == [400, 500, 400]
    with pytest.raises(InvalidRequest):
        engine.generate([REFUSE])
    with pytest.raises(InvalidRequest):
        engine.generate("x", temperature=-1.0)


def test_a_stream_may_be_left(engine: Engine, built: list[Core]) -> None:
    assert "".join(chunk.text for chunk in engine.stream("x")) == ANSWER
    leaving = engine.stream("x")
    next(leaving)
    del leaving
    assert engine.generate("x").text == ANSWER
    assert engine.chat([{"role": "user", "content": "hi"}]).text == ANSWER


def test_options_are_named_or_given(engine: Engine) -> None:
    options = options_of(SamplingParams(top_k=3), {"temperature": 0.5, "stop": "x", "n": 2})
    assert options.n == 2 and options.params == SamplingParams(top_k=3, temperature=0.5, stop=("x",))
    assert configured(Config(), {"path": "m", "page_size": 4}).kv.page_size == 4
    with pytest.raises(TypeError, match="pages"):
        configured(Config(), {"pages": 4})
    with pytest.raises(TypeError):
        engine.generate("x", no_such_option=1)


def test_options_may_have_sglangs_names() -> None:
    config = configured(Config(), {
        "model_path": "m", "tokenizer_path": "m", "mem_fraction_static": 0.5, "tp_size": 1, "dtype": "bfloat16",
        "context_length": 64, "log_level": "error", "trust_remote_code": True, "disable_radix_cache": True,
        "disable_cuda_graph": False, "random_seed": None, "max_running_requests": 4,
    })  # fmt: skip
    assert (config.model.path, config.model.dtype, config.model.context_length) == ("m", "bfloat16", 64)
    assert (config.kv.memory_share, config.kv.cache, config.device.graphs) == (0.5, "none", "on")
    assert (config.schedule.max_running, config.serve.log_level) == (4, "error")
    refused = {"tp_size": 2, "random_seed": 3, "tokenizer_path": "other", "attention_backend": "fa3"}
    for name, value in refused.items():
        with pytest.raises(TypeError, match=name):
            configured(Config(), {"path": "m", name: value})
    with pytest.raises(TypeError, match="twice"):
        configured(Config(), {"path": "m", "model_path": "n"})


def test_start_that_fails_leaves_nothing_behind(built: list[Core]) -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no such model"):
        Engine("missing")
    assert set(threading.enumerate()) <= before


def test_closing_ends_its_threads(built: list[Core]) -> None:
    before = set(threading.enumerate())
    engine = Engine()
    engine.generate("x" * 5000)
    engine.close()
    engine.close()
    assert {t.name for t in set(threading.enumerate()) - before} == set()


def test_a_closed_engine_says_so(built: list[Core]) -> None:
    engine = Engine()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate("x")


def test_parameters_of_the_wrong_kind_are_refused() -> None:
    assert options_of(None, {"stop_regex": "[a-z]", "stop": "x"}).params.stop_regex == ("[a-z]",)
    assert options_of(None, {"seed": np.int64(5), "logit_bias": {5: 1}}).params.seed == 5
    for wrong in ({"seed": 1.5}, {"stop": 3}, {"bad_words": ["x"]}, {"allowed_token_ids": [3.5]}, {"stop": object()}):
        with pytest.raises(InvalidRequest, match="sampling parameters"):
            options_of(None, wrong)


def test_public_names_are_there_and_cost_nothing_until_used() -> None:
    script = "import sys, bough\nassert not {'numpy', 'torch', 'msgspec'} & set(sys.modules)\nbough.SamplingParams()"
    subprocess.run([sys.executable, "-c", script], cwd=Path(bough.__file__).parent.parent, check=True)
    assert bough.Engine is Engine
    with pytest.raises(AttributeError):
        bough.nothing  # noqa: B018
