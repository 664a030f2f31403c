"""``bough bench json`` on a tiny model, and the schemas that it asks for."""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from pathlib import Path

import jsonschema
import pytest

from bough.base.cli import from_arguments
from bough.base.config import Config
from bough.base.errors import ConfigError
from bough.bench import json as bench
from bough.bench.schemas import BUILT_IN, LONG, bfcl
from bough.cli.main import build_parser

QUESTION = {
    "id": "multiple_0",
    "question": [[{"role": "user", "content": "How warm?"}]],
    "function": [
        {"name": "warmth", "parameters": {"type": "dict", "required": ["at"], "properties": {
            "at": {"type": "tuple", "items": {"type": "float"}, "description": "where"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"}, "more": {"type": "any"}}}},
        {"name": "nothing", "parameters": {"type": "dict", "properties": {}}},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("bench"), context_length=1024)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "bfcl.tar.xz"
    data = "\n".join([json.dumps(QUESTION)] * 5).encode()
    with tarfile.open(path, "w:xz") as tar:
        for name in ("x/data/BFCL_v4_multiple.json", "x/data/possible_answer/BFCL_v4_multiple.json"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def arguments(model: Path, *more: str) -> argparse.Namespace:
    return build_parser("bench").parse_args(
        ["bench", "json", str(model), "--dtype", "float32", "--pool-tokens", "4096",
         "--batches", "1,3", "--tokens", "6", "--repeats", "1", "--first-tokens", "3", *more]
    )  # fmt: skip


def test_the_figures(model: Path, archive: Path) -> None:
    result = bench.run(arguments(model, "--data", str(archive), "--cases", "1", "--answer-tokens", "40"))
    groups = result["forwards"]
    assert set(groups) == {"tool calls", "records", "nested orders", "enums", "BFCL"} and result["errors"] == 0
    for figures in groups.values():
        # In float32 the answers are the same with jump and without.
        assert figures["different"] == 0 and figures["tokens"] == figures["tokens_without"]
        assert figures["valid"] == figures["finished"] and figures["refused"] == 0
    assert groups["tool calls"]["saved_percent"] > 30
    assert set(result["batches"]) == {"1", "3"} and result["batches"]["3"]["constrained_ratio"] > 0
    assert result["backend"]["mask"]["ms_p50"] > 0 and result["first_token"]["cold"]["ms_p50"] > 0
    text = bench.summary(json.loads(json.dumps(result)))
    assert "| tool calls " in text and "| 3 rows " in text


def test_schemas_that_are_refused_at_once(model: Path) -> None:
    config = from_arguments(arguments(model), Config())
    runner = bench.Runner(config)
    try:
        for _ in range(2):  # the second time the scheduler knows before it steps
            [told] = runner.run([[1, 2]], [{"not": {"type": "string"}}], 4)
            assert told.finish is not None and told.finish.status == 400 and not told.stamps
    finally:
        runner.core.close()


def test_bad_sizes_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="at least"):
        bench.run(arguments(model, "--batches", "0"))


def test_built_in_schemas_are_schemas() -> None:
    for case in BUILT_IN:
        jsonschema.Draft202012Validator.check_schema(case.schema)
    jsonschema.Draft202012Validator.check_schema(LONG)


def test_functions_of_the_leaderboard(archive: Path, tmp_path: Path) -> None:
    first, second = bfcl(archive, 2)
    assert first == second and first.question == "How warm?"
    right = {"name": "warmth", "arguments": {"at": [1.5], "more": {"a": None}}}
    wrong = [
        {"name": "warmth", "arguments": {}},
        {"name": "warmth", "arguments": {"at": 1.5}},
        {"name": "warmth", "arguments": {"at": [], "unit": "K"}},
        {"name": "nothing", "arguments": {"at": []}},
        {"name": "else", "arguments": {}},
    ]
    validator = jsonschema.Draft202012Validator(first.schema)
    assert validator.is_valid(right) and validator.is_valid({"name": "nothing", "arguments": {}})
    assert not any(validator.is_valid(value) for value in wrong)
    with pytest.raises(ConfigError, match="cannot read"):
        bfcl(tmp_path / "absent", 2)
