"""Formats of structural tags whose arguments are written without JSON are bounded before they are written."""

from __future__ import annotations

from typing import Any

import pytest

from bough.base.errors import InvalidRequest
from bough.base.limits import DEFAULT_LIMITS
from bough.server.constraints import native_constraint
from bough.server.schema import NativeSampling

BIG = {"$defs": {"big": {"enum": [f"v{i}" for i in range(1000)]}}, "type": "object"}


def asked(schema: dict[str, Any]) -> str:
    form = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    constraint = native_constraint(NativeSampling(structural_tag={"format": form}), DEFAULT_LIMITS)
    assert constraint is not None
    return constraint.text


def test_what_arguments_refer_to_is_written_once() -> None:
    text = asked({**BIG, "properties": {f"p{i}": {"$ref": "#/$defs/big"} for i in range(200)}})
    assert text.count("v999/") == 1


@pytest.mark.parametrize("schema", [
    {**BIG, "properties": {f"p{i}": {"anyOf": [{"$ref": "#/$defs/big"}, {"const": f"{i}"}]} for i in range(900)}},
    {"type": "object", "properties": {f"p{i}": {} for i in range(DEFAULT_LIMITS.constraint_properties + 1)}},
    {"type": "object", "properties": {"a": {"enum": [*range(DEFAULT_LIMITS.constraint_nodes)]}}},
])  # fmt: skip
def test_bombs_are_refused_with_the_name_of_the_field(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        asked(schema)
    assert refusal.value.param == "structural_tag"
