"""Existing programs observe the same, and send the same requests, as on SGLang's own frontend."""

from __future__ import annotations

import json
from typing import Any

import pytest

import bough

from .programs import UNORDERED
from .record import RECORDED, observe

FOUND: dict[str, Any] = json.loads(RECORDED.read_text())

JOINED = "SGLang's server has no /concate_and_append_request; the next sync waits forever"

LOST = "SGLang drops the logprobs of chunks that come before the reader has taken the one before"

DIFFERENT: dict[str, tuple[Any, str]] = {
    "join_text@stub-model": ("head part0 part1 tail", JOINED),
    "streaming_logprobs@stub-model": (
        [" delta epsilon zeta", [[-0.5, 0, " delta"], [-0.5, 1, " epsilon"], [-0.5, 2, " zeta"]], 3],
        LOST,
    ),
    "group_iteration@stub-model": (
        [["a", "b", "c"], ["nothing", "Exception", "ProgramStateGroup"]],
        "the states of a fork can be counted",
    ),
}
"""Case -> (our result, why it is not theirs)."""


def in_order(case: str, requests: list[Any]) -> list[str]:
    lines = [json.dumps(request) for request in requests]
    return sorted(lines) if case.partition("@")[0] in UNORDERED else lines


@pytest.mark.filterwarnings("ignore:Both dtype")
@pytest.mark.parametrize("case", FOUND)
def test_as_recorded(case: str) -> None:
    name, _, model = case.partition("@")
    ours = observe(bough, name, model)
    if case in DIFFERENT:
        assert ours["result"] == DIFFERENT[case][0]
        return
    assert ours["result"] == FOUND[case]["result"]
    assert in_order(case, ours["requests"]) == in_order(case, FOUND[case]["requests"])
