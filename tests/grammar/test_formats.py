"""Formats as patterns, against Python's calendar; and that nothing but a schema's format is rewritten."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from bough.base.formats import FORMATS, exact_schema, with_exact_schema


def matches(name: str, text: str) -> bool:
    return all(re.search(part["pattern"], text) and len(text) <= part.get("maxLength", 999) for part in FORMATS[name])


@pytest.mark.parametrize("year", [0, 1, 4, 96, 100, 400, 999, 1900, 2000, 2023, 2024, 2100, 9996, 9999])
def test_dates_are_those_of_the_calendar(year: int) -> None:
    for month in range(14):
        for day in range(33):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                datetime.date.fromisoformat(text)
            except ValueError:
                assert not matches("date", text), text
            else:
                assert matches("date", text), text
                assert matches("date-time", f"{text}T23:59:59.5+23:59") and not matches("date-time", text)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("time", ["00:00:00Z", "23:59:59.123456789z", "12:30:00-08:00"],
         ["24:00:00Z", "23:59:60Z", "12:30Z", "1:2:3Z"]),
        ("hostname", ["a", "A-1.b.2", "a" * 63, ".".join(["a" * 63] * 3)],
         ["", "-a", "a-", "a..b", "a.", "a_b", "xn--a", "a" * 64, ".".join(["a" * 63] * 4)]),
    ],
)  # fmt: skip
def test_times_and_host_names(name: str, right: list[str], wrong: list[str]) -> None:
    assert all(matches(name, text) for text in right) and not any(matches(name, text) for text in wrong)


def test_only_formats_of_schemas_are_rewritten() -> None:
    date: dict[str, Any] = {"format": "date"}
    kept = {
        "properties": {"format": {"const": date, "default": date}, "x": {"format": "uuid", "enum": [date]}},
        "examples": [date],
    }
    text = json.dumps(kept)
    assert exact_schema(json.loads(text)) == kept and json.loads(with_exact_schema(text)) == kept
    exact = {"allOf": list(FORMATS["date"])}
    schema = {
        "type": "string", "format": "date", "allOf": [{"minLength": 1}],
        "$defs": {"const": {"items": [date, {"not": date}]}},
        "properties": {"properties": {"additionalProperties": date}, "enum": date},
    }  # fmt: skip
    assert exact_schema(json.loads(json.dumps(schema))) == {
        "type": "string", "allOf": [{"minLength": 1}, *FORMATS["date"]],
        "$defs": {"const": {"items": [exact, {"not": exact}]}},
        "properties": {"properties": {"additionalProperties": exact}, "enum": exact},
    }  # fmt: skip
