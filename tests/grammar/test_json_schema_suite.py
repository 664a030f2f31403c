"""The JSON-Schema-Test-Suite: strictly, nothing invalid is accepted, and docs/json_schema.md says what is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import NEEDS_XGRAMMAR

ROOT = Path(__file__).parents[2]
SUITE = ROOT.parent / "shared/data/quality/json_schema_test_suite.tar.xz"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("json_schema_table", ROOT / "scripts/json_schema_table.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_invalid_is_accepted(script: ModuleType) -> None:
    if not SUITE.exists():
        pytest.skip(f"the suite is not at {SUITE}")
    found = script.measure(SUITE)
    rows = [row for keywords in found.values() for row in keywords.values()]
    assert sum(row.invalid for row in rows) > 900 and sum(row.valid for row in rows) > 900
    assert [hole for row in rows for hole in row.holes] == []
    assert script.page(found) + "\n" == (ROOT / "docs/json_schema.md").read_text()


@NEEDS_XGRAMMAR
@pytest.mark.slow
def test_nor_by_xgrammar(script: ModuleType) -> None:
    if not SUITE.exists():
        pytest.skip(f"the suite is not at {SUITE}")
    rows = [row for keywords in script.measure(SUITE, "xgrammar").values() for row in keywords.values()]
    assert sum(row.invalid for row in rows) > 900 and sum(row.accepted for row in rows) > 850
    assert [hole for row in rows for hole in row.holes] == []


def test_the_script_finds_holes(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests/draft7"
    folder.mkdir(parents=True)
    (folder / "minimum.json").write_text(
        '[{"description": "d", "schema": {"properties": {"b": {"minimum": 2}, "a": {}}}, "tests": ['
        '{"description": "in", "data": {"a": [], "b": 2}, "valid": true},'
        '{"description": "out", "data": {"b": 1}, "valid": false},'
        '{"description": "said to be out", "data": {"b": 3}, "valid": false}]},'
        '{"description": "e", "schema": {"uniqueItems": true}, "tests": []}]'
    )
    row = script.measure(tmp_path)["draft7"]["minimum"]
    assert (row.schemas, row.refused, row.valid, row.accepted, row.invalid, row.rejected) == (2, 1, 1, 1, 2, 1)
    assert row.holes == ["d: said to be out"]
