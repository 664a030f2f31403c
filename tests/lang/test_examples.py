"""The examples run, on the embedded model in this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bough
from bough.base.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
if not EXAMPLES.exists():
    pytest.skip("needs the source tree", allow_module_level=True)
NAMES = sorted(p.stem for p in EXAMPLES.glob("*.py") if p.stem != "common")


@pytest.fixture(scope="module")
def engine() -> Iterator[bough.Engine]:
    try:
        engine = bough.Engine(context_length=1024, pool_tokens=8192, threads=1)
    except ConfigError as error:
        pytest.skip(f"the embedded model is not there: {error}")
    with engine:
        yield engine


@pytest.fixture
def example(request: pytest.FixtureRequest, engine: bough.Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(bough.global_config, "default_backend", engine)
    spec = importlib.util.spec_from_file_location(request.param, EXAMPLES / f"{request.param}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module.main()


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", [name], indirect=True)


@of("few_shot")
def test_few_shot(example: Any) -> None:
    assert example["Germany"] == "Berlin" and len(example) == 4


@of("multi_turn")
def test_multi_turn(example: Any) -> None:
    assert [m["role"] for m in example] == ["system", "user", "assistant", "user", "assistant"]


@of("react_agent")
def test_react_agent(example: Any) -> None:
    calls = example.get_meta_info("answer")["tool_calls"]
    assert isinstance(example["answer"], int) and len(calls) <= 3
    assert calls and calls[0]["tool"] == "population"


@of("tree_of_thought")
def test_tree_of_thought(example: Any) -> None:
    assert isinstance(example.ret_value, int)
    total = example.report().total
    assert total.calls == 2 + 2 + 4 and total.reused > total.computed


@of("skeleton_of_thought")
def test_skeleton_of_thought(example: Any) -> None:
    assert len(example["detail"]) == 3


@of("self_consistency")
def test_self_consistency(example: Any) -> None:
    assert isinstance(example["answer"], int) and example.ret_value


@of("llm_judge")
def test_llm_judge(example: Any) -> None:
    assert set(example["grade"]) <= {"poor", "fair", "good"} and len(example["grade"]) == 3


@of("json_extraction")
def test_json_extraction(example: Any) -> None:
    booking = example["booking"]
    assert 0 < booking.guests < 20 and booking.meal in ("lunch", "dinner")


@of("multi_document_qa")
def test_multi_document_qa(example: Any) -> None:
    assert example["answer"].strip() == "2"


def test_every_example_is_tested() -> None:
    assert all(f"test_{name}" in globals() for name in NAMES)
